"""Records what clients send: ``VLLMOPS_RECORD=1`` in front of a run of tests/live/test_agents.py.

A recording has the shape of the requests and none of their words: it is data of the tests.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

RECORDING = os.environ.get("VLLMOPS_RECORD") == "1"
RECORDED = Path(__file__).parents[1] / "support/requests"
# The fields that have words, or tell whose they are.
WORDS = frozenset({"text", "description", "instructions", "title", "output", "prompt_cache_key"})
IDENTITY, SEALED = re.compile(r"[0-9a-f]{8,}(-[0-9a-f]{4,})*"), "encrypted_content"


def neutralize(value: Any, field: str = "") -> Any:
    """A request without its words and identities, and with its shape."""
    match value:
        case dict():
            return {
                name: "x" if field == "client_metadata" else neutralize(inner, name)
                for name, inner in value.items()
            }
        case list():
            return [neutralize(inner, field) for inner in value]
        case str() if field in WORDS:
            return "words"
        case str() if field == SEALED:
            return "sealed"
        case str():
            return IDENTITY.sub("0", value)
    return value


@contextmanager
def record(url: str, name: str) -> Iterator[str]:
    """The URL of a server that notes what is sent to another one; the same where none is recorded.

    Args:
        url: of the other one, with ``/v1``.
        name: of the recording.
    """
    if not RECORDING:
        yield url
        return
    bodies: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path.endswith("/responses"):
                bodies.append(neutralize(json.loads(body)))
            head = {"Content-Type": "application/json", "Authorization": "Bearer one"}
            path = self.path.removeprefix("/v1")
            answer = httpx.post(f"{url}{path}", content=body, headers=head, timeout=300)
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers["content-type"])
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
    RECORDED.mkdir(exist_ok=True)
    unlike = {json.dumps(body, sort_keys=True): body for body in bodies}
    text = "".join(f"{json.dumps(body, sort_keys=True)}\n" for body in unlike.values())
    (RECORDED / f"{name}.jsonl").write_text(text)
