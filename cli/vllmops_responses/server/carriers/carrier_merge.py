"""Merges the conversation in a client's carrier with the request's input, each item once.

A client returns a carrier in one of two ways. In ``previous_response``, the whole response that
contained it, the carrier replaces everything before the request's input (vLLM #35903). Among the
items of the input, where clients append each output to what they send next, it replaces everything
before it, whether the client repeats that or not. Only the latest carrier counts. Two kinds of
items before it are used nevertheless:

- system and developer messages at the very beginning: they replace those at the beginning of the
  carrier's history, because clients may change them from turn to turn;
- a tool's output that the carrier lacks although it has the call: a client may add the output
  before the carrier arrives, which is the last item of an answer.

Clients that reorder an answer (reasoning first, for example) repeat parts of it behind the carrier.
There an item that the carrier has is left out. It is recognised by its id, by the id of its call,
or, for an assistant's message, by its text.

A reasoning item that another provider encrypted (OpenAI, for example) is left out where nothing of
it is readable: no vLLM server can use it.

In format 1 the history consists of chat messages, as in #35903; this module converts them to items.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ...keys.carrier import is_vllm_carrier
from ..wire_format import ENCODE, ENCRYPTED, ApiError

INCLUDE = ENCRYPTED
PREVIOUS = "previous_response"
COMPACTION = "compaction"
SEALED = frozenset({"reasoning", COMPACTION})
INSTRUCTIONS = frozenset({"system", "developer"})
CALLS = frozenset({"function_call", "custom_tool_call"})
OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
CALL, OUTPUT, ITEM = "call", "output", "item"
FUNCTIONS = "functions."

Item = dict[str, Any]


class RequestCarrier(NamedTuple):
    """A carrier that a request brings.

    Args:
        text: the carrier.
        item_index: its index among the items of the input, -1 where it is not among them.
        param: the request parameter that contains it.
        carrier_name: the item that contains it, where that is no carrier.
    """

    text: str
    item_index: int
    param: str
    carrier_name: str = ""


def find_carrier(items: list[Item], previous_response: Any) -> RequestCarrier | None:
    """The carrier that counts, None if there is none.

    Args:
        items: of the request's input.
        previous_response: its ``previous_response``, None if it has none.

    Raises:
        ApiError: ``previous_response`` has no carrier, or the input has a later one.
    """
    at = max((n for n, item in enumerate(items) if is_carrier_or_compaction(item)), default=-1)
    if previous_response is None and at >= 0 and items[at].get("type") == COMPACTION:
        param = f"input[{at}]"
        return RequestCarrier(
            get_encrypted_content(items[at]), at, param, f"compaction item {param}"
        )
    if previous_response is None:
        return RequestCarrier(get_encrypted_content(items[at]), at, "input") if at >= 0 else None
    text = extract_carrier_text(previous_response)
    if at >= 0 and get_encrypted_content(items[at]) != text:
        message = "The input has another carrier than previous_response: send only one of them."
        raise ApiError(400, message, PREVIOUS)
    return RequestCarrier(text, at, PREVIOUS)


def extract_carrier_text(previous_response: Any) -> str:
    """The carrier in a response.

    Raises:
        ApiError: it has none.
    """
    output = previous_response.get("output") if isinstance(previous_response, dict) else None
    if not isinstance(output, list):
        message = "previous_response is not a response: send the whole response object."
        raise ApiError(400, message, PREVIOUS)
    found = [item for item in output if isinstance(item, dict)]
    texts = [get_encrypted_content(item) for item in found if item.get("type") == "reasoning"]
    if not (ours := list(filter(is_vllm_carrier, texts))):
        message = "previous_response has no carrier" + (
            ": its encrypted content is not from this server. " if any(texts) else ". "
        )
        message += f'Each turn must request one with store=false and include=["{INCLUDE}"].'
        raise ApiError(400, message, PREVIOUS)
    return ours[-1]


def is_carrier_or_compaction(item: Item) -> bool:
    """Whether an item replaces all before it: a carrier, or a compaction item of anybody's."""
    return item.get("type") == COMPACTION or is_vllm_carrier(get_encrypted_content(item))


def get_encrypted_content(item: Item) -> str:
    """The encrypted content of an item, empty if it has none."""
    content = item.get("encrypted_content") if item.get("type") in SEALED else None
    return content if isinstance(content, str) else ""


def extract_readable_part(item: Item) -> Item | None:
    """An item without its encrypted content, None if nothing else is in it."""
    if item.get("type") == COMPACTION:
        return None
    if not get_encrypted_content(item):
        return item
    if not (item.get("content") or item.get("summary")):
        return None
    return {name: value for name, value in item.items() if name != "encrypted_content"}


def merge_history(
    history: list[Item], items: list[Item], carrier_index: int
) -> tuple[list[Item], list[int]]:
    """The conversation that a carrier and a request's input make together.

    Args:
        history: what the carrier holds.
        items: of the request's input.
        carrier_index: the carrier's index among them, -1 where all of them come after it.

    Returns:
        The history, and the indices of the items that are not in it.
    """
    history = replace_instructions(history, items[: max(carrier_index, 0)])
    known = {mark for item in history if (mark := identify_item(item))}
    behind = items[carrier_index + 1 :]
    repeated = [
        n for n, item in enumerate(behind, carrier_index + 1) if identify_item(item) in known
    ]
    texts: set[tuple[str, str] | None] = set()
    if repeated or any(item.get("role") == "assistant" for item in behind):
        texts = {extract_role_and_text(item) for item in history} - {None}
    end = find_end_of_repeats(items, max(repeated, default=carrier_index), texts)

    def is_new(n: int, item: Item) -> bool:
        if n >= end:
            return n > end
        mark, text = identify_item(item), extract_role_and_text(item)
        if mark and mark[0] == OUTPUT:
            return mark not in known and (CALL, mark[1]) in known
        if n <= carrier_index or mark in known:
            return False
        return text not in texts if text else mark is not None

    return history, [n for n, item in enumerate(items) if is_new(n, item)]


def replace_instructions(history: list[Item], preceding_items: list[Item]) -> list[Item]:
    """A history that begins with the instructions that a client sends before the carrier, if any.

    Args:
        history: what the carrier holds.
        preceding_items: the items before the carrier.
    """
    instructions = select_leading_instructions(preceding_items)
    if not instructions:
        return history
    return [*instructions, *history[len(select_leading_instructions(history)) :]]


def find_end_of_repeats(
    items: list[Item], last_index: int, texts: set[tuple[str, str] | None]
) -> int:
    """The index of the last item that the history has; clients put new items behind repeated ones.

    Args:
        items: of the request's input.
        last_index: the index of the last one that is known by its id.
        texts: the messages of the history.
    """
    for item in items[last_index + 1 :]:
        if item.get("role") != "assistant" or extract_role_and_text(item) not in texts:
            break
        last_index += 1
    return last_index


def identify_item(item: Item) -> tuple[str, str] | None:
    """What identifies an item, None if nothing does."""
    kind, call_id, item_id = item.get("type"), item.get("call_id"), item.get("id")
    if isinstance(call_id, str) and kind in CALLS | OUTPUTS:
        return CALL if kind in CALLS else OUTPUT, call_id
    return (ITEM, item_id) if isinstance(item_id, str) else None


def select_leading_instructions(items: list[Item]) -> list[Item]:
    """The system and developer messages that a conversation begins with."""
    count = 0
    while count < len(items) and items[count].get("role") in INSTRUCTIONS:
        count += 1
    return items[:count]


def extract_role_and_text(item: Item) -> tuple[str, str] | None:
    """The role and the text of a message, None if an item is no message."""
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or not isinstance(content, str | list):
        return None
    return role, extract_text(content)


def extract_text(content: Any) -> str:
    """The text of a message.

    Raises:
        TypeError: it is neither a text nor a list of parts.
    """
    return content if isinstance(content, str) else "".join(map(extract_part_text, content))


def extract_part_text(part: Any) -> str:
    """The text of a part of a message; for an image and the like, its JSON."""
    text = part.get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else ENCODE(part).decode()


def drop_unneeded_fields(item: Item) -> Item:
    """An item without the fields that no later turn needs."""
    made = {name: value for name, value in item.items() if value is not None}
    if isinstance(content := made.get("content"), list):
        made["content"] = [
            {name: value for name, value in part.items() if name != "logprobs"}
            if isinstance(part, dict)
            else part
            for part in content
        ]
    return made


def convert_messages_to_items(messages: list[Item]) -> list[Item]:
    """Convert a history of chat messages, or of gpt-oss's Harmony messages, to items.

    Args:
        messages: of format 1. A system message that is no item holds the instructions of an
            earlier turn, which do not apply to later turns.

    Raises:
        LookupError, TypeError, AttributeError: they are no such messages.
    """
    return [item for message in messages for item in convert_message_to_items(message)]


def convert_message_to_items(message: Item) -> Iterator[Item]:
    if "author" in message:
        yield from convert_harmony_to_items(message)
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
            yield make_reasoning_item(reasoning)
        if content:
            yield make_assistant_item(extract_text(content))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            yield make_call_item(call["id"], function["name"], function["arguments"])


def convert_harmony_to_items(message: Item) -> Iterator[Item]:
    """Harmony has no call ids: the tool's name serves as id, as its output follows at once."""
    author, channel = message["author"], message.get("channel")
    role, to = author["role"], message.get("recipient") or ""
    # The library may have left the content out (openai/harmony#78).
    text = "".join(part.get("text") or "" for part in message["content"])
    if role == "tool":
        name = (author.get("name") or "").removeprefix(FUNCTIONS)
        yield {"type": "function_call_output", "call_id": f"call_{name}", "output": text}
    elif role == "assistant" and to.startswith(FUNCTIONS):
        name = to.removeprefix(FUNCTIONS)
        yield make_call_item(f"call_{name}", name, text)
    elif not text or to:
        return
    elif role == "assistant":
        yield make_reasoning_item(text) if channel == "analysis" else make_assistant_item(text)
    elif role == "user":
        yield {"type": "message", "role": "user", "content": text}


def make_reasoning_item(text: str) -> Item:
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "summary": [], "content": [part]}


def make_assistant_item(text: str) -> Item:
    part = {"type": "output_text", "text": text}
    return {"type": "message", "role": "assistant", "content": [part]}


def make_call_item(call_id: str, name: str, arguments: str) -> Item:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
