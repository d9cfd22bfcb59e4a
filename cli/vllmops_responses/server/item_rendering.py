"""Replaces the items of a request that vLLM can't render by items that it can.

Histories that began elsewhere have items of every type of OpenAI's API, and of well-known clients'
own. A tool's call and its output become those of a function. Any other item becomes a message with
its fields as text, of the user or of the assistant.
"""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

from openai.types.responses import ResponseInputItemParam, ToolParam
from pydantic_core import PydanticCustomError

from .wire_format import ENCODE

Item = dict[str, Any]
MESSAGE, REASONING = "message", "reasoning"
# The types that stay as they are: vLLM renders them, or the server has replaced them before.
RENDERED = frozenset(
    {MESSAGE, REASONING, "function_call", "function_call_output"}
    | {"custom_tool_call", "custom_tool_call_output", "additional_tools"}
    | {"compaction", "item_reference"}
)
# The type of Codex's messages from one agent to another; not in OpenAI's API.
AGENT_MESSAGE = "agent_message"
# The type of the item that asks for a compaction, at the end of the input.
TRIGGER = "compaction_trigger"
# The types that have nothing for the model.
SKIPPED = frozenset({"configuration_update", "mcp_list_tools", TRIGGER})
# A skipped item becomes an empty answer with this prefix and the item's type as its id.
SKIPPED_ID = "skipped_"
# The text in place of a file's content.
FILE_MARK = "(a file)"
ROLES = frozenset({"user", "assistant", "system", "developer"})


def list_types(union: Any) -> set[str]:
    """The values that ``type`` can have in one of OpenAI's unions."""
    hints = (get_type_hints(member).get("type") for member in get_args(union))
    return {name for hint in hints for name in get_args(hint) if isinstance(name, str)}


KNOWN = {AGENT_MESSAGE, *RENDERED, TRIGGER, *list_types(ResponseInputItemParam)}
KNOWN_TOOLS = list_types(ToolParam)
# The fields of an item that are not for the model.
BOOKKEEPING = frozenset(
    {"type", "id", "call_id", "caller", "pending_safety_checks", "encrypted_content"}
    | {"acknowledged_safety_checks", "container_id", "fingerprint", "max_output_length"}
)
# The fields of these types that are for the model all the same.
RESULT_FIELDS = frozenset({("apply_patch_call_output", "status"), ("mcp_approval_request", "id")})
# The fields of an item that hold a file, and what a text begins with that is one.
FILES, DATA_URL = frozenset({("image_generation_call", "result")}), "data:"


def validate_types(items: Any, tools: Any) -> None:
    """Check that this server knows the type of each item and tool of a request.

    Args:
        items: of its input; what is no list of objects is left to vLLM.
        tools: as that.

    Raises:
        PydanticCustomError: which it does not know, with its ``place`` in the request.
    """
    for name, given, find in (
        ("input", items, find_item_problem),
        ("tools", tools, find_tool_problem),
    ):
        for at, one in enumerate(given if isinstance(given, list) else ()):
            if isinstance(one, dict) and (what := find(one)):
                context = {"place": f"{name}[{at}]", "what": what}
                raise PydanticCustomError("unknown", "{place} {what}", context)


def find_item_problem(item: Item) -> str:
    """Why this server does not know an item; empty if it does."""
    kind, role = item.get("type"), item.get("role")
    if kind is None and role is None:
        return "" if is_reference(item) else "has neither a type nor a role"
    if not isinstance(kind, str | None) or (kind or MESSAGE) not in KNOWN:
        return f"is of type {kind!r}, which this server does not know"
    if kind in {None, MESSAGE} and not (isinstance(role, str) and role in ROLES):
        return f"has the role {role!r}, which this server does not know"
    return ""


def find_tool_problem(tool: Item) -> str:
    """Why this server does not know a tool; empty if it does."""
    kind = tool.get("type")
    known = isinstance(kind, str) and kind in KNOWN_TOOLS
    return "" if known else f"is of type {kind!r}, which this server does not know"


def is_reference(item: Any) -> bool:
    """Whether an item stands for another one, which the server has stored."""
    if not isinstance(item, dict):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and item.keys() - {"type"} == {"id"})


def render_item(item: Item) -> Item:
    """An item as one that vLLM renders; the same if vLLM renders it."""
    kind = item.get("type")
    if kind is None or kind in RENDERED or not isinstance(kind, str):
        return item
    if kind in SKIPPED:
        return {**make_message("assistant", ""), "id": f"{SKIPPED_ID}{kind}", "content": []}
    if kind == AGENT_MESSAGE:
        text = "".join(str(part.get("text") or "") for part in list_item_parts(item))
        names = f"{item.get('author')} to {item.get('recipient')}"
        return make_message("user", f"Message from {names}: {text}")
    call_id = item.get("id" if kind == "local_shell_call_output" else "call_id")
    given = {
        name: FILE_MARK if (kind, name) in FILES else value
        for name, value in item.items()
        if (kind, name) in RESULT_FIELDS or is_model_field(name, value)
    }
    if kind.endswith("_output") and isinstance(call_id, str):
        output = given["output"] if given.keys() == {"output"} else given
        text = output if isinstance(output, str) else render_json(output)
        return {"type": "function_call_output", "call_id": call_id, "output": text}
    if isinstance(call_id, str):
        return {
            "type": "function_call",
            "call_id": call_id,
            "name": kind.removesuffix("_call"),
            "arguments": render_json(given),
        }
    role = "user" if kind.endswith("_response") else "assistant"
    return make_message(role, f"[{kind}] {render_json(given)}")


def is_model_field(field: str, value: Any) -> bool:
    """Whether a field of an item is for the model; of statuses, only ``failed`` is."""
    if field in BOOKKEEPING or value is None or value in ("", [], {}):
        return False
    return field != "status" or value == "failed"


def get_skipped_type(item: Any) -> str:
    """The type of the item that was skipped for an item of vLLM's; empty if none was."""
    item_id = str(getattr(item, "id", None))
    is_one = item_id.startswith(SKIPPED_ID) and not item.content
    return item_id.removeprefix(SKIPPED_ID) if is_one else ""


def make_message(role: str, text: str) -> Item:
    """A message of one text."""
    kind = "output_text" if role == "assistant" else "input_text"
    part: Item = {"type": kind, "text": text}
    return {"type": MESSAGE, "role": role, "content": [part]}


def render_json(value: Any) -> str:
    """A value as JSON, without the files in it."""
    return ENCODE(drop_files(value)).decode()


def drop_files(value: Any) -> Any:
    """A value in which each file is only mentioned."""
    match value:
        case dict():
            return {name: drop_files(inner) for name, inner in value.items()}
        case list():
            return list(map(drop_files, value))
        case str() if value.startswith(DATA_URL):
            return FILE_MARK
    return value


def list_item_parts(item: Item) -> list[Item]:
    """The parts of an item that has some: of a message, or of what a tool gave."""
    content = item.get("content") or item.get("output")
    given = content if isinstance(content, list) else []
    return [part for part in given if isinstance(part, dict)]


def join_texts(parts: list[Any], between: str) -> list[Any]:
    """Join parts into one, because vLLM renders the first one alone, unless one has no text.

    Args:
        parts: of an answer or of reasoning; at least one.
        between: what separates their texts.
    """
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        return parts
    return [{**parts[0], "text": between.join(map(str, texts))}]
