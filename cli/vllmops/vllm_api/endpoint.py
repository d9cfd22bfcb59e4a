"""The address of a server's HTTP API, and what is known of the server behind it."""

from __future__ import annotations

from dataclasses import dataclass

from ..host.listeners import here
from ..store.urls import shown
from ..targets import Url


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
        return Endpoint(url.text, shown(url.text), local=here(url.host, surely=True))

    @property
    def or_store(self) -> str:
        """An alternative to add to a hint: the store itself; empty if its URL is unknown."""
        return f"; or, on the store itself: --store {shown(self.store)}" if self.store else ""
