"""The address of a server's HTTP API, and what is known of the server behind it."""

from __future__ import annotations

from dataclasses import dataclass

from ...model.targets import ServerUrl
from ...support.urls import redact_url
from ..machine.listeners import is_this_machine


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
    def from_url(url: ServerUrl) -> Endpoint:
        """The endpoint behind a URL that a person gave; it may be of any machine."""
        return Endpoint(
            url.text, redact_url(url.text), local=is_this_machine(url.host, exclusive=True)
        )

    @property
    def store_hint(self) -> str:
        """An alternative to add to a hint: the store itself; empty if its URL is unknown."""
        return f"; or, on the store itself: --store {redact_url(self.store)}" if self.store else ""
