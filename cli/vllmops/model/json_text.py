"""JSON of what may hold no text: a path or a title of any bytes, half of a surrogate pair."""

from __future__ import annotations

from typing import Any

import msgspec


def encode_json(content: object) -> bytes:
    """JSON; what UTF-8 can't hold is shown as an escape.

    A file's name and a process's title may have any bytes, and a client's request any string that
    JSON can hold.
    """
    try:
        return msgspec.json.encode(content)
    except UnicodeEncodeError:
        return msgspec.json.encode(_escape_unencodable(msgspec.to_builtins(content)))


def _escape_unencodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escape_unencodable(key): _escape_unencodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape_unencodable(item) for item in value]
    return value
