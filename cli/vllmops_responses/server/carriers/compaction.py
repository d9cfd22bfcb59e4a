"""Compaction: replaces a conversation by its user's messages and a summary that the model writes.

What is left is sealed like a carrier, in an item of the type ``compaction``, which the client sends
back in place of everything before it. Messages of the user, the system and the developer are kept
unchanged, and so is a tool call that still waits for its output. Of everything else the summary is
left. See the page `compaction` of the manual.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
from openai.types.responses import Response as OfficialResponse
from openai.types.responses import (
    ResponseCompactionItem,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseInProgressEvent,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseUsage,
)

from vllmops.agent.hooks import vllm_objects
from vllmops.model.environment import COMPACTION_PROMPT

from ...store.backend import BROKEN
from ...store.response_defaults import DEFAULTS
from .. import wire_format
from ..item_rendering import TRIGGER, get_skipped_type, render_item
from ..wire_format import ApiError
from . import carrier_merge
from .carrier_merge import Item, extract_text

FIELD = "context_management"
# The parameters of OpenAI's /responses/compact, and those that Codex sends besides.
PARAMETERS = frozenset(
    {"model", "input", "instructions", "previous_response_id", carrier_merge.PREVIOUS}
    | {"prompt_cache_key", "prompt_cache_retention", "service_tier"}
    | {"tools", "parallel_tool_calls", "reasoning", "text"}
)
# Of the request, these count for the summary, too.
PASSED = ("model", "instructions", "reasoning", "cache_salt", "priority", "mm_processor_kwargs")
PROMPT = """\
Summarize the conversation above for whoever continues it without seeing it. The user's messages \
are kept unchanged beside your summary, so do not repeat them. Write down: what was answered and \
decided; what tools were called for and what they returned, with names, numbers, paths and errors \
exactly as they were; what is done, and what is still to do. Write only the summary."""
HEADING = "Summary of the conversation so far, in which the messages above are quoted unchanged:\n"
# What begins the id of an item that has a summary.
MARK = "cmp_"
# A summary has at most this many tokens, and at most this part of the model's length.
MOST_TOKENS, PART = 4096, 8
# Without a threshold, a conversation that takes this part of the model's length is compacted.
FULL = 0.8
LEAST_CHARACTERS = 64
# Events that come before the first item of an answer.
OPENING = frozenset({"response.created", "response.queued", "response.in_progress"})


class SummaryUsage(NamedTuple):
    """The tokens that summaries took."""

    input: int = 0
    cached_input: int = 0
    output: int = 0
    reasoning: int = 0

    def add_usage(self, usage: Any) -> SummaryUsage:
        """Add those of an answer of vLLM's."""
        if usage is None:
            return self
        given, made = usage.input_tokens_details, usage.output_tokens_details
        return SummaryUsage(
            self.input + usage.input_tokens,
            self.cached_input + (given.cached_tokens if given else 0),
            self.output + usage.output_tokens,
            self.reasoning + (made.reasoning_tokens if made else 0),
        )

    def to_dict(self) -> dict[str, Any]:
        """In the form of the API."""
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": self.cached_input, "cache_write_tokens": 0},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.input + self.output,
        }


class CompactedConversation(NamedTuple):
    """A conversation after its compaction.

    Args:
        items: what is left of it.
        usage: what it took.
    """

    items: list[Item]
    usage: SummaryUsage


def load_summary_prompt() -> str:
    """What asks the model for a summary: a file that the environment names, or `PROMPT`."""
    path = os.environ.get(COMPACTION_PROMPT)
    if not path:
        return PROMPT
    try:
        return Path(path).read_text("utf-8").strip() or PROMPT
    except (OSError, UnicodeError) as error:
        vllm_objects.report_problem(f"the prompt for compaction is vllmops' own: {path}: {error}")
        return PROMPT


def parse_compact_threshold(request: Any, max_model_len: int) -> int | None:
    """From how many tokens on a request wants its conversation compacted; None if it does not.

    Args:
        request: vLLM's; a ``context_management`` that makes no sense is as if there was none.
        max_model_len: how many tokens the model takes.
    """
    match getattr(request, FIELD, None):
        case [{"type": carrier_merge.COMPACTION} as entry, *_]:
            tokens = entry.get("compact_threshold")
            if tokens is None:
                return int(max_model_len * FULL)
            return tokens if type(tokens) is int and tokens >= 1 else None
    return None


def validate_compact_body(body: bytes) -> set[str]:
    """Check that a request for a compaction names a model.

    Args:
        body: of the request, a JSON object.

    Returns:
        The parameters that have no effect on a compaction.

    Raises:
        ApiError: it does not.
    """
    try:
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except BROKEN as error:
        raise ApiError(400, f"The request is not strict JSON: {error}") from error
    if bytes(given.get("model", b"null")) == b"null":
        raise ApiError(400, "Missing required parameter: 'model'.", "model")
    return {name for name, value in given.items() if bytes(value) != b"null"} - PARAMETERS


def build_summary_parameters(request: Any, max_model_len: int) -> dict[str, Any]:
    """The parameters of a request for a summary, all but its input.

    Args:
        request: whose conversation it is.
        max_model_len: how many tokens the model takes.
    """
    same = {name: found for name in PASSED if (found := getattr(request, name, None)) is not None}
    return {
        **same,
        "store": False,
        "max_output_tokens": max(1, min(MOST_TOKENS, max_model_len // PART)),
    }


async def compact_conversation(
    answer: Callable[[list[Item]], Awaitable[Any]],
    fits: Callable[[list[Item]], Awaitable[bool]],
    items: Sequence[Item],
    prompt: str,
) -> CompactedConversation:
    """Replace a conversation by its user's messages and a summary.

    A conversation that does not fit into the model is summarized in parts, as text: the summary of
    each part begins the next one.

    Args:
        answer: makes vLLM answer an input.
        fits: whether vLLM would accept an input.
        items: of the conversation.
        prompt: the prompt.

    Raises:
        ApiError: vLLM can't summarize it.
    """

    def build_summary_input(source_items: Sequence[Item]) -> list[Item]:
        return join_summary_messages([*source_items, make_user_message(prompt, MARK)])

    if await fits(whole := build_summary_input(items)):
        made = await answer(whole)
        return CompactedConversation(
            build_compacted_items(items, extract_output_text(made.output)),
            SummaryUsage().add_usage(made.usage),
        )
    rest, text, used = render_transcript(items), "", SummaryUsage()
    while rest:
        size = len(rest)
        before = f"{HEADING}{text}\n\n" if text else ""
        while not await fits(
            part := build_summary_input([make_user_message(before + rest[:size], MARK)])
        ):
            size //= 2
            if size < LEAST_CHARACTERS:
                raise ApiError(
                    400, "The model is too short to summarize the conversation.", "input"
                )
        made = await answer(part)
        text, rest, used = extract_output_text(made.output), rest[size:], used.add_usage(made.usage)
    return CompactedConversation(build_compacted_items(items, text), used)


def build_compacted_items(items: Sequence[Item], summary: str) -> list[Item]:
    """What is left of a conversation: messages, the summary, and calls that wait for outputs."""
    answered = {
        mark[1]
        for item in items
        if (mark := carrier_merge.identify_item(item)) and is_output_identity(mark)
    }
    waiting = [
        item
        for item in items
        if item.get("type") in carrier_merge.CALLS and is_unanswered_call(item, answered)
    ]
    text = HEADING + (summary or "(There is none.)")
    return [
        *filter(should_keep_item, items),
        make_user_message(text, f"{MARK}{uuid4().hex}"),
        *waiting,
    ]


def is_output_identity(mark: tuple[str, str]) -> bool:
    return mark[0] == carrier_merge.OUTPUT


def is_unanswered_call(call: Item, answered_ids: set[str]) -> bool:
    return call.get("call_id") not in answered_ids


def should_keep_item(item: Item) -> bool:
    """Whether a compaction keeps an item unchanged."""
    return item.get("role") in {"user", *carrier_merge.INSTRUCTIONS} and not is_summary(item)


def is_summary(item: Item) -> bool:
    """Whether an item is the summary of an earlier compaction."""
    return item.get("role") == "user" and str(item.get("id") or "").startswith(MARK)


def make_user_message(text: str, item_id: str) -> Item:
    part = {"type": "input_text", "text": text}
    return {"type": "message", "role": "user", "id": item_id, "content": [part]}


def join_summary_messages(items: Sequence[Item]) -> list[Item]:
    """Items in which each summary is one message with the user's messages beside it.

    Many chat templates refuse two messages of the user in a row.
    """
    made: list[Item] = []
    run: list[Item] = []
    for item in [*items, {}]:
        if item.get("role") == "user":
            run.append(item)
            continue
        if len(run) > 1 and any(map(is_summary, run)):
            run = [{"type": "message", "role": "user", "content": join_message_parts(run)}]
        made += run
        run = []
        if item:
            made.append(item)
    return made


def join_message_parts(messages: Sequence[Item]) -> list[Item]:
    """The parts of messages, with a blank line after each text but the last."""
    made: list[Item] = []
    for one in messages:
        content = one.get("content")
        texts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
        made += [dict(part) for part in texts or ()]
    for part in made[:-1]:
        if isinstance(text := part.get("text"), str):
            part["text"] = f"{text}\n\n"
    return made


def render_transcript(items: Sequence[Item]) -> str:
    """A conversation as text, for what is too long for the model; an image is its type there."""
    return "".join(
        f"{format_speaker(item)}: {extract_item_text(item)}\n\n" for item in map(render_item, items)
    )


def format_speaker(item: Item) -> str:
    return str(item.get("role") or item.get("type") or "item").replace("_", " ")


def extract_item_text(item: Item) -> str:
    """What an item says."""
    if "arguments" in item or "input" in item:
        return f"{item.get('name')} {item.get('arguments') or item.get('input')}"
    content = item.get("output", item.get("content")) or item.get("summary") or ""
    if isinstance(content, str):
        return content
    return " ".join(str(part.get("text") or f"[{part.get('type')}]") for part in content)


def extract_output_text(output: Sequence[Any]) -> str:
    """The text of an answer; if its limit left only reasoning, the text of that."""
    items = [item.model_dump(mode="json", by_alias=True) for item in output]
    for kind in ("message", "reasoning"):
        texts = [
            extract_text(item.get("content") or "") for item in items if item.get("type") == kind
        ]
        if text := "\n".join(texts).strip():
            return text
    return ""


def make_compaction_item(text: str) -> Any:
    """The item with what is left of a conversation, sealed."""
    return ResponseCompactionItem(
        id=f"{MARK}{uuid4().hex}", type="compaction", encrypted_content=text
    )


def encode_compaction(
    items: Sequence[Item], item: Any, usage: SummaryUsage, created_at: float
) -> bytes:
    """The answer to a request for a compaction."""
    response_id = f"resp_{uuid4().hex}"
    users = [one for one in items if one.get("role") == "user" and not is_summary(one)]
    shown = [wire_format.build_listed_item(one, response_id, n) for n, one in enumerate(users)]
    return wire_format.ENCODE(
        {
            "id": response_id,
            "object": "response.compaction",
            "created_at": int(created_at),
            "output": [*shown, item.model_dump(mode="json", exclude_none=True)],
            "usage": usage.to_dict(),
        }
    )


def is_triggered(request: Any) -> bool:
    """Whether a request asks for a compaction in place of an answer."""
    items = request.input
    return isinstance(items, list) and bool(items) and get_skipped_type(items[-1]) == TRIGGER


def make_response(request: Any, model: str, created_at: float, **fields: Any) -> Any:
    """The response to a request that asks for a compaction; what is missing in it is None.

    Args:
        request: vLLM's.
        model: that makes it.
        created_at: when it began.
        fields: others, such as its output.
    """
    return OfficialResponse.model_construct(
        **{
            **dict.fromkeys(DEFAULTS),
            "id": request.request_id,
            "created_at": int(created_at),
            "model": model,
            "object": "response",
            "status": "in_progress",
            "output": [],
            "previous_response_id": request.previous_response_id,
            **fields,
        }
    )


async def generate_events(
    compact: Callable[[], Awaitable[tuple[Any, SummaryUsage]]], make: Callable[..., Any]
) -> AsyncGenerator[Any, None]:
    """The events of an answer that is nothing but a compaction.

    Args:
        compact: gives the item with what is left of the conversation, and what it took.
        make: makes the response, with some of its fields.
    """
    yield ResponseCreatedEvent.model_construct(
        type="response.created", sequence_number=0, response=make()
    )
    yield ResponseInProgressEvent.model_construct(
        type="response.in_progress", sequence_number=1, response=make()
    )
    item, used = await compact()
    for event in make_item_events(item, 2):
        yield event
    usage = ResponseUsage.model_validate(used.to_dict())
    done = make(status="completed", output=[item], usage=usage)
    yield ResponseCompletedEvent.model_construct(
        type="response.completed", sequence_number=4, response=done
    )


async def prepend_item(events: AsyncGenerator[Any, None], item: Any) -> AsyncGenerator[Any, None]:
    """The events of a stream, with an item that comes before those of the answer."""
    shift = 0
    async with aclosing(events):
        async for event in events:
            if not shift and event.type not in OPENING:
                for told in make_item_events(item, event.sequence_number):
                    shift += 1
                    yield told
            event.sequence_number += shift
            if hasattr(event, "output_index"):
                event.output_index += 1
            if shift and hasattr(event, "response"):
                event.response.output.insert(0, item)
            yield event


def make_item_events(item: Any, number: int) -> tuple[Any, Any]:
    """The events that announce an item, the first one with a sequence number."""
    begun = item.model_copy(update={"encrypted_content": ""})
    return (
        ResponseOutputItemAddedEvent(
            type="response.output_item.added", item=begun, output_index=0, sequence_number=number
        ),
        ResponseOutputItemDoneEvent(
            type="response.output_item.done", item=item, output_index=0, sequence_number=number + 1
        ),
    )
