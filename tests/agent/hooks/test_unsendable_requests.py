"""Requests that can't be sent, on a front end like vLLM's; tests/live has the real one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from vllmops.agent.hooks import unsendable_requests


class AsyncLLM:
    """Notes a request, then encodes it."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    async def _add_request(self, request: Any, prompt: str, parent: Any, *given: Any) -> None:
        self.known[(parent or request).request_id] = prompt, *given
        msgspec.msgpack.encode(vars(request))

    async def abort(self, names: list[str], *, internal: bool) -> None:
        assert internal
        for name in names:
            self.known.pop(name, None)
        msgspec.msgpack.encode(names)


@pytest.mark.parametrize(
    "fields", [{"request_id": "cmpl-\ud800"}, {"stop": "\ud800"}, {"xargs": {"a": 1 << 70}}]
)
def test_request_that_can_not_be_sent_is_forgotten(fields: Any) -> None:
    module: Any = SimpleNamespace(AsyncLLM=type("AsyncLLM", (AsyncLLM,), dict(vars(AsyncLLM))))
    unsendable_requests.hook_front_end(module)
    unsendable_requests.hook_front_end(module)
    client = module.AsyncLLM()
    asyncio.run(client._add_request(SimpleNamespace(request_id="a"), "prompt", None, 0))
    request = SimpleNamespace(**{"request_id": "b", **fields})
    for parent in (None, SimpleNamespace(request_id="c")):
        with pytest.raises(ValueError, match="can't be sent to the engine"):
            asyncio.run(client._add_request(request, "prompt", parent, 0))
    assert client.known == {"a": ("prompt", 0)}
