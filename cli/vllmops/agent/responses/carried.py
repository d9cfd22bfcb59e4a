"""Conversations that clients carry: what a carrier stands for, so that each turn is said once.

A carrier comes back in either of two ways. In ``previous_response``, the whole response that it
came in, it stands for all that was before the request's input (#35903). Among the items of the
input, where clients append each output to what they send next, it stands for all before it: for
what they repeat there, and for what they don't. The latest one counts, the others are not looked
at. Of what stands before it this is taken all the same:

- system and developer messages at the very beginning, in the place of those that it begins with:
  clients that send them so may change them from turn to turn;
- the output of a tool whose call it has and whose output it has not: a client may have put it
  there before the carrier, which ends an answer, had come.

Clients that put each answer in an order of their own, reasoning first say, repeat some of it
behind the carrier. There an item that the carrier has, told by its id, by the id of its call, or
as a message of the assistant's by its words, is left out.

A reasoning item that somebody else has encrypted, OpenAI say, is left out where it has nothing
that can be read: no server of vLLM's could make anything of it.

In format 1 the history is chat messages, as #35903 has it; they become items here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ...keys.carrier import is_ours
from .wire import ENCODE, Refused

WANTED = "reasoning.encrypted_content"
PREVIOUS = "previous_response"
HEADS = frozenset({"system", "developer"})
CALLS = frozenset({"function_call", "custom_tool_call"})
OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
CALL, OUTPUT, ITEM = "call", "output", "item"
FUNCTIONS = "functions."

Item = dict[str, Any]


class Brought(NamedTuple):
    """A carrier that a request brings.

    Args:
        text: the carrier.
        at: its index among the items of the input, -1 where it is not among them.
        param: the parameter that it came in.
    """

    text: str
    at: int
    param: str


def brought(items: list[Item], previous: Any) -> Brought | None:
    """The carrier that counts, None where there is none.

    Args:
        items: of the request's input.
        previous: its ``previous_response``, None where it has none.

    Raises:
        Refused: ``previous_response`` has no carrier, or the input has a later one.
    """
    at = max((n for n, item in enumerate(items) if is_ours(encrypted(item))), default=-1)
    if previous is None:
        return Brought(encrypted(items[at]), at, "input") if at >= 0 else None
    text = within(previous)
    if at >= 0 and encrypted(items[at]) != text:
        message = "The input has another carrier than previous_response: give one of them."
        raise Refused(400, message, PREVIOUS)
    return Brought(text, at, PREVIOUS)


def within(previous: Any) -> str:
    """The carrier in a response.

    Raises:
        Refused: it has none.
    """
    output = previous.get("output") if isinstance(previous, dict) else None
    if not isinstance(output, list):
        message = "previous_response is not a response: give the whole object as it was answered."
        raise Refused(400, message, PREVIOUS)
    texts = [encrypted(item) for item in output if isinstance(item, dict)]
    if not (ours := list(filter(is_ours, texts))):
        message = "previous_response has no carrier" + (
            ": what is encrypted in it is not this server's. " if any(texts) else ". "
        )
        message += f'Each turn has to ask for one, by store=false and include=["{WANTED}"].'
        raise Refused(400, message, PREVIOUS)
    return ours[-1]


def encrypted(item: Item) -> str:
    """What is encrypted in an item, empty where nothing is."""
    found = item.get("encrypted_content") if item.get("type") == "reasoning" else None
    return found if isinstance(found, str) else ""


def readable(item: Item) -> Item | None:
    """An item without what is encrypted in it, None where nothing else is in it."""
    if not encrypted(item):
        return item
    if not (item.get("content") or item.get("summary")):
        return None
    return {name: value for name, value in item.items() if name != "encrypted_content"}


def whole(history: list[Item], items: list[Item], at: int) -> tuple[list[Item], list[int]]:
    """A conversation out of what its carrier holds and what a client sends with it.

    Args:
        history: what the carrier holds.
        items: of the request's input.
        at: the carrier's index among them, -1 where all of them come after it.

    Returns:
        The history, and the indices of the items that go on from there.
    """
    head = heads(items[: max(at, 0)])
    if head:
        history = [*head, *history[len(heads(history)) :]]
    marks = {mark for item in history if (mark := identity(item))}
    behind = items[at + 1 :]
    repeated = [n for n, item in enumerate(behind, at + 1) if identity(item) in marks]
    # Whatever a client repeats stands before what is new.
    end = max(repeated, default=at)
    said: set[tuple[str, str] | None] = set()
    if repeated or any(item.get("role") == "assistant" for item in behind):
        said = {speech(item) for item in history} - {None}
    for item in items[end + 1 :]:
        if item.get("role") != "assistant" or speech(item) not in said:
            break
        end += 1

    def new(n: int, item: Item) -> bool:
        mark, words = identity(item), speech(item)
        if mark and mark[0] == OUTPUT and n < end:
            return mark not in marks and (CALL, mark[1]) in marks
        if at < n < end:
            return mark not in marks and (words not in said if words else mark is not None)
        return n > end

    return history, [n for n, item in enumerate(items) if new(n, item)]


def identity(item: Item) -> tuple[str, str] | None:
    """What tells an item from all others, None where nothing does."""
    kind, call_id, item_id = item.get("type"), item.get("call_id"), item.get("id")
    if isinstance(call_id, str) and kind in CALLS | OUTPUTS:
        return CALL if kind in CALLS else OUTPUT, call_id
    return (ITEM, item_id) if isinstance(item_id, str) else None


def heads(items: list[Item]) -> list[Item]:
    """The system and developer messages that a conversation begins with."""
    count = 0
    while count < len(items) and items[count].get("role") in HEADS:
        count += 1
    return items[:count]


def speech(item: Item) -> tuple[str, str] | None:
    """Who says what in a message, None where an item is no message."""
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or not isinstance(content, str | list):
        return None
    return role, text_of(content)


def text_of(content: Any) -> str:
    """The text of a message.

    Raises:
        TypeError: it is neither a text nor a list of parts.
    """
    return content if isinstance(content, str) else "".join(map(words_of, content))


def words_of(part: Any) -> str:
    """The text of a part of a message; for an image and the like, what tells it from others."""
    text = part.get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else ENCODE(part).decode()


def lean(item: Item) -> Item:
    """An item without what no later turn needs of it."""
    made = {name: value for name, value in item.items() if value is not None}
    if isinstance(content := made.get("content"), list):
        made["content"] = [
            {name: value for name, value in part.items() if name != "logprobs"} for part in content
        ]
    return made


def from_messages(messages: list[Item]) -> list[Item]:
    """Items out of a history as chat messages, or, of gpt-oss, as Harmony's.

    Args:
        messages: of format 1. A system message that is no item was the instructions of an earlier
            turn, and those don't carry over.

    Raises:
        LookupError, TypeError, AttributeError: they are none.
    """
    return [item for message in messages for item in from_message(message)]


def from_message(message: Item) -> Iterator[Item]:
    if "author" in message:
        yield from from_harmony(message)
        return
    role, content = message["role"], message.get("content")
    if role == "tool":
        call_id = message["tool_call_id"]
        yield {"type": "function_call_output", "call_id": call_id, "output": content}
    elif role != "assistant":
        if role != "system" or "type" in message:
            yield {"type": "message", **message}
    else:
        if reasoning := message.get("reasoning"):
            yield thought(reasoning)
        if content:
            yield answer(text_of(content))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            yield called(call["id"], function["name"], function["arguments"])


def from_harmony(message: Item) -> Iterator[Item]:
    """Harmony names no calls: the name of a tool has to do, and its output follows at once."""
    author, channel = message["author"], message.get("channel")
    role, to = author["role"], message.get("recipient") or ""
    # The library may have left the content out (openai/harmony#78).
    text = "".join(part.get("text") or "" for part in message["content"])
    if role == "tool":
        name = (author.get("name") or "").removeprefix(FUNCTIONS)
        yield {"type": "function_call_output", "call_id": f"call_{name}", "output": text}
    elif role == "assistant" and to.startswith(FUNCTIONS):
        name = to.removeprefix(FUNCTIONS)
        yield called(f"call_{name}", name, text)
    elif not text or to:
        return
    elif role == "assistant":
        yield thought(text) if channel == "analysis" else answer(text)
    elif role == "user":
        yield {"type": "message", "role": "user", "content": text}


def thought(text: str) -> Item:
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "summary": [], "content": [part]}


def answer(text: str) -> Item:
    part = {"type": "output_text", "text": text}
    return {"type": "message", "role": "assistant", "content": [part]}


def called(call_id: str, name: str, arguments: str) -> Item:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
