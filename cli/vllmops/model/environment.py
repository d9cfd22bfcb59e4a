"""The environment variables that tell a server's processes what `vllmops serve` was told."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from ..support.home import locate_home
from ..support.urls import redact_url

ADMIN_TOKEN_FILE = "VLLMOPS_ADMIN_TOKEN_FILE"  # noqa: S105 - its name
KEYRING = "VLLMOPS_KEYRING"
SIGNING_KEY = "VLLM_RESPONSES_STATE_SIGNING_KEY"
STORE = "VLLMOPS_RESPONSES_STORE"
# A class of the user's own, in place of the store that a URL names.
STORE_CLASS = "VLLM_RESPONSES_STORE_BACKEND"
MAX_SIZE = "VLLM_RESPONSES_API_STORE_MAX_SIZE"
MAX_PER_KEY = "VLLMOPS_RESPONSES_STORE_MAX_PER_KEY"
TTL = "VLLMOPS_RESPONSES_STORE_TTL"
CARRIER = "VLLMOPS_CARRIER"
CARRIER_TTL = "VLLMOPS_CARRIER_TTL"
# A file with the prompt that asks a model to summarize a conversation.
COMPACTION_PROMPT = "VLLMOPS_COMPACTION_PROMPT"
SOCKET_MESSAGE = "VLLMOPS_WEBSOCKET_MAX_MESSAGE"
SOCKET_IDLE = "VLLMOPS_WEBSOCKET_IDLE"
SOCKET_REQUESTS = "VLLMOPS_WEBSOCKET_MAX_REQUESTS"
SOCKET_CONNECTIONS = "VLLMOPS_WEBSOCKET_MAX_CONNECTIONS"
# Names one start of a server, and the start before whose background responses are run again.
RUN = "VLLMOPS_RUN"
RERUN = "VLLMOPS_RERUN"

# The variables that `vllmops_responses.store.settings.validate_settings` reads first. It reads a
# store's limits only where one of these names a store.
CHECKED = frozenset(
    {STORE, STORE_CLASS, CARRIER, CARRIER_TTL}
    | {SOCKET_MESSAGE, SOCKET_IDLE, SOCKET_REQUESTS, SOCKET_CONNECTIONS}
)
OFF = "none"  # in place of a store's URL, or of a keyring's file
LARGEST_MESSAGE = 16 << 20  # bytes; uvicorn takes no larger one


class CarrierFormat(StrEnum):
    """How a carrier is written."""

    V2 = "v2"  # encrypted, and padded
    SIGNED_V1 = "signed-v1"  # as #35903 has it, for all to read


class KeyringSource(NamedTuple):
    """Where a ring comes from: a file, a single key of the environment's, or nowhere.

    Args:
        path: the file, whether it is there or not; None for a key of the environment's.
        text: that key, in hex; empty if no keys are wanted.
    """

    path: Path | None
    text: str = ""

    def __str__(self) -> str:
        return str(self.path or (SIGNING_KEY if self.text else OFF))

    @property
    def is_disabled(self) -> bool:
        """Whether no keys are wanted."""
        return self.path is None and not self.text


def find_keyring_source(
    environment: Mapping[str, str], chosen_path: Path | None = None
) -> KeyringSource:
    """Where a process finds its ring: an explicit choice wins over a default.

    Args:
        environment: of the process.
        chosen_path: a file that was named on the command line; `OFF` for no keys, there as here.
    """
    if place := chosen_path or environment.get(KEYRING):
        return KeyringSource(None) if str(place) == OFF else KeyringSource(Path(place).absolute())
    if text := environment.get(SIGNING_KEY):
        return KeyringSource(None, text)
    return KeyringSource(locate_default_keyring())


def locate_default_keyring() -> Path:
    """The default place of the ring; `resolve_home` checks whether it may be used."""
    return locate_home() / "keyring.json"


def redact_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without the password of the store."""
    safe = dict(environment)
    if STORE in safe:
        safe[STORE] = redact_url(safe[STORE])
    return safe
