"""The address of a server's HTTP API, and what is known of the server behind it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..store.urls import shown
from ..targets import Url

LOCAL = re.compile(r"localhost|127(\.[0-9]+){3}|::1")


@dataclass(frozen=True)
class Endpoint:
    """A server to ask.

    Args:
        url: of its API, without ``/v1``.
        name: how messages name it.
        store: the URL of its store, if a record has it.
        local: whether it is on this machine.
        vllm: whether it is known to be vLLM, not just any program.
    """

    url: str
    name: str
    store: str | None = None
    local: bool = True
    vllm: bool = False

    @staticmethod
    def of(url: Url) -> Endpoint:
        """The endpoint behind a URL that a person gave; it may be of any machine."""
        return Endpoint(url.text, shown(url.text), local=bool(LOCAL.fullmatch(url.host)))

    @property
    def or_store(self) -> str:
        """An alternative to add to a hint: the store itself; empty if its URL is unknown."""
        return f"; or, on the store itself: --store {shown(self.store)}" if self.store else ""
