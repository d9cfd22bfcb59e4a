"""Clients of the stored responses of live servers: OpenAI's own, and many at once."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import httpx
import openai

from vllmops.collect.agents import agent_client
from vllmops.collect.machine.processes import Process
from vllmops.model import process_identity
from vllmops.model.roles import Role

from ..support.waiting import until

if TYPE_CHECKING:
    from .conftest import Live

MODEL = "demo-text"
# Renders all that a message may hold, so that what is missing makes a shorter prompt.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['reasoning'] or '' }}"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] or [] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% for call in m['tool_calls'] or [] %}"
    "{{ call['function']['name'] }} {{ call['function']['arguments'] }}{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
LENGTH = ("--max-model-len", "4096")
# A random model may end an answer with any token.
ENDLESS: dict[str, Any] = {"extra_body": {"ignore_eos": True}}
# Or say nothing but what is no text: so it says one word, and ends.
SPEAKS: dict[str, Any] = {"extra_body": {"structured_outputs": {"choice": ["on"]}}}
# Of these a fast machine is done with 1,800 before the next request comes.
SLOW: dict[str, Any] = {"max_output_tokens": 3800, **ENDLESS}
# Within which what is cancelled has to stop, wherever it runs.
STOPPED_S = 7


def talkative(folder: Path) -> tuple[str, ...]:
    """What makes a server render all of a conversation, and take tools."""
    template = folder / "all.jinja"
    template.write_text(TEMPLATE)
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    return ("--chat-template", str(template), *tools)


def base(server: Live) -> str:
    return f"{server.url}/v1"


def connect(base: str, key: str = "one", retries: int = 0) -> Any:
    """OpenAI's client, with a connection for each request; its unions of types say too little."""
    return openai.OpenAI(
        base_url=base,
        api_key=key,
        max_retries=retries,
        timeout=120,
        default_headers={"Connection": "close"},
    )


def send_responses_request(
    base: str, path: str, method: str = "GET", key: str = "one", **options: Any
) -> Any:
    return httpx.request(
        method,
        f"{base}/responses{path}",
        headers={"Authorization": f"Bearer {key}"},
        timeout=60,
        **options,
    )


def say(client: Any, text: Any = "hello", **options: Any) -> Any:
    given = {"max_output_tokens": 4, **options}
    return client.responses.create(model=MODEL, input=text, **given)


def wait_until_response_ends(client: Any, response_id: str, timeout_s: float = 30) -> Any:
    def fetch_ended_response() -> Any:
        found = client.responses.retrieve(response_id)
        return found if found.status not in {"queued", "in_progress"} else None

    return until(fetch_ended_response, timeout_s)


def background(client: Any, **options: Any) -> Any:
    return say(client, background=True, **{**SLOW, **options})


def start_background_stream(client: Any, **options: Any) -> tuple[Any, str]:
    """A background stream that has begun, and the id of its response."""
    stream = background(client, stream=True, **options)
    return stream, next(iter(stream)).response.id


def reach(server: Live, role: str) -> list[agent_client.Agent]:
    """The agents in the processes of a role."""
    pids = [row["pid"] for row in server.row["processes"] if row["role"] == role]
    born = [process_identity.read_identity(pid).start_ticks for pid in pids]
    return [
        agent_client.open_agent(Process(Role(role), *item)) for item in zip(pids, born, strict=True)
    ]


KINDS: dict[str, dict[str, Any]] = {
    "foreground": {},
    "background": {"background": True},
    "stream": {"stream": True},
    "unstored": {"store": False},
}


class Told(NamedTuple):
    """What a client was told.

    Args:
        base: by whom.
        kind: of what it asked.
        began: when it asked, on the monotonic clock.
        status: of HTTP, 0 where the connection broke.
        retry_after: seconds, where it is to try again.
        stored: the id of a response that it may rely on, empty where there is none.
        over: when it was told.
    """

    base: str
    kind: str
    began: float
    status: int
    retry_after: str
    stored: str
    over: float


class Load:
    """Clients that ask servers for short responses of each kind, without end.

    Args:
        bases: where.
        key: with which API key.
    """

    def __init__(self, *bases: str, key: str = "one") -> None:
        self.headers = {"Authorization": f"Bearer {key}"}
        self.told: list[Told] = []
        self.over = threading.Event()
        self.each = list(itertools.product(bases, KINDS))
        self.threads = [
            threading.Thread(target=self.send_requests, args=item) for item in self.each
        ]

    def __enter__(self) -> Self:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()

    def send_requests(self, base: str, kind: str) -> None:
        body = {"model": MODEL, "input": "hello", "max_output_tokens": 1, **KINDS[kind]}
        with httpx.Client(headers=self.headers, timeout=60) as client:
            while not self.over.wait(0.05):
                began, status, retry_after, stored = time.monotonic(), 0, "", ""
                try:
                    answer = client.post(f"{base}/responses", json=body)
                except httpx.TransportError:
                    self.over.wait(0.5)
                else:
                    status, retry_after = answer.status_code, answer.headers.get("Retry-After", "")
                    stored = relied_on(kind, answer)
                over = time.monotonic()
                self.told.append(Told(base, kind, began, status, retry_after, stored, over))

    @property
    def stored_ids(self) -> set[str]:
        """The ids of all that was acknowledged as stored."""
        return {item.stored for item in self.told if item.stored}

    def wait(self, times: int = 3, timeout_s: float = 30) -> None:
        """Until each client has got what it wanted so many times, of what it asks from now on."""
        now = time.monotonic()

        def has_enough_answers() -> bool:
            well = [
                (item.base, item.kind)
                for item in list(self.told)
                if item.began > now and item.status == 200
                if item.stored or item.kind == "unstored"
            ]
            return all(well.count(item) >= times for item in self.each)

        until(has_enough_answers, timeout_s, lambda: self.told[-20:])


def relied_on(kind: str, answer: httpx.Response) -> str:
    """The id of the response that an answer tells as stored, or empty."""
    if answer.status_code != 200 or kind == "unstored":
        return ""
    if kind != "stream":
        return str(answer.json()["id"])
    last = json.loads(answer.text.rpartition("data: ")[2])
    if last["type"] in {"response.completed", "response.incomplete"}:
        return str(last["response"]["id"])
    assert "not stored" in last["response"]["error"]["message"]
    return ""


def list_responses(base: str, key: str = "one") -> dict[str, Any]:
    """All of an owner's responses by id."""
    found: dict[str, Any] = {}
    query = "?limit=100"
    while True:
        page = send_responses_request(base, query, key=key).json()
        found |= {item["id"]: item for item in page["data"]}
        if not page["has_more"]:
            return found
        query = f"?limit=100&after={page['last_id']}"


def fetch_stored_responses(base: str, wanted: Collection[str]) -> dict[str, Any]:
    """Responses that a server was told to keep, each of which it has."""

    def try_list_responses() -> dict[str, Any]:
        return (
            list_responses(base)
            if send_responses_request(base, "?limit=1").status_code == 200
            else {}
        )

    found: dict[str, Any] = until(try_list_responses, 30)
    assert not set(wanted) - found.keys()
    return {item: found[item] for item in wanted}


# -- conversations that clients carry ----------------------------------------------------

CARRY: dict[str, Any] = {"store": False, "include": ["reasoning.encrypted_content"]}
PREVIOUS, ALONE, ALL = WAYS = ("previous response", "carrier alone", "all items")
QUESTIONS = ("first", "second", "the same", "the same")


def sealed_in(response: Any) -> str:
    """The carrier of an answer, which ends with it."""
    item = response.output[-1]
    assert (item.type, item.summary, item.content) == ("reasoning", [], None)
    text: str = item.encrypted_content
    return text


def request_carrier_answer(client: Any, given: Any, *, streamed: bool, **options: Any) -> Any:
    """An answer that carries its conversation, streamed or not."""
    if not streamed:
        return say(client, given, **CARRY, **options)
    events = list(say(client, given, stream=True, **CARRY, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added, done, last = events[-3:]
    assert last.type in {"response.completed", "response.incomplete"}
    assert (added.type, done.type) == ("response.output_item.added", "response.output_item.done")
    assert added.output_index == done.output_index == len(last.response.output) - 1
    assert (added.item.id, added.item.encrypted_content) == (done.item.id, None)
    assert done.item == last.response.output[-1]
    whole = [event.item for event in events if event.type == "response.output_item.done"]
    # An answer of gpt-oss that was cut off is told as completed in the event, by vLLM.
    one, other = (
        [item.model_dump(exclude={"status"}) for item in items]
        for items in (whole, last.response.output)
    )
    assert one == other
    return last.response


def count_input_tokens(client: Any, given: Any, **options: Any) -> int:
    """The tokens of an input, without an answer."""
    found = client.responses.input_tokens.count(model=MODEL, input=given, **options)
    assert found.object == "response.input_tokens"
    return int(found.input_tokens)


def count(client: Any, items: list[Any], **options: Any) -> int:
    """How long a conversation is for the model where a client sends each item of it."""
    plain = [item for item in items if not getattr(item, "encrypted_content", None)]
    tokens: int = say(client, plain, store=False, **options).usage.input_tokens
    return tokens


def run_carrier_conversation(
    clients: Sequence[Any], way: str, *, streamed: bool, **options: Any
) -> list[Any]:
    """The answers of a conversation that its client carries, each turn to the next of `clients`.

    For the model it is as long as where the client sends each item of it.
    """
    sent: list[Any] = [{"role": "developer", "content": "be brief"}]
    answers: list[Any] = []
    for question, client in zip(QUESTIONS, itertools.cycle(clients), strict=False):
        asked = {"role": "user", "content": question}
        sent.append(asked)
        given: Any = sent
        more = dict[str, Any]()
        if answers and way == ALONE:
            given = [answers[-1].output[-1], asked]
        elif answers and way == PREVIOUS:
            before = {"previous_response": answers[-1].model_dump(mode="json")}
            given, more = question, {"extra_body": before}
        answer = request_carrier_answer(client, given, streamed=streamed, **more, **options)
        assert answer.usage.input_tokens == count(client, sent, **options)
        assert answer.usage.input_tokens == count_input_tokens(client, given, **more)
        sent += answer.output
        answers.append(answer)
    return answers
