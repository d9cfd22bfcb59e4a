"""The agents' Unix sockets, for both ends: place, limits, and how answers are written."""

import json
from typing import Any

import msgspec

DIRECTORY = "agents"  # below the state directory
PATH_BYTES = 107  # sun_path of unix(7), without its final NUL
BODY_BYTES = 4 << 20  # of a request; some 60,000 cache keys


def encoded(content: Any) -> bytes:
    """An answer as JSON.

    Half of a surrogate pair becomes ``?``: a client may put it into the id of a request, JSON can
    hold it, and UTF-8 can't.
    """
    try:
        return msgspec.json.encode(content)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(content), ensure_ascii=False)
        return text.encode(errors="replace")
