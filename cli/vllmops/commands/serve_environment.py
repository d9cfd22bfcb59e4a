"""The environment variables that the options of ``vllmops serve`` stand for, as ``K=V``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..agent.patches.registry import OFF, require_patch
from ..collect.agents import admin_token
from ..model.environment import (
    ADMIN_TOKEN_FILE,
    CARRIER,
    CARRIER_TTL,
    COMPACTION_PROMPT,
    KEYRING,
    MAX_PER_KEY,
    MAX_SIZE,
    SIGNING_KEY,
    SOCKET_CONNECTIONS,
    SOCKET_IDLE,
    SOCKET_MESSAGE,
    SOCKET_REQUESTS,
    STORE,
    TTL,
    CarrierFormat,
    KeyringSource,
    find_keyring_source,
)
from ..support.errors import VllmopsError
from ..support.files import read_input
from .options import parse_duration

MOST_PROMPT = 1 << 20  # bytes


def make_patch_variables(ids: Sequence[str]) -> list[str]:
    """The environment variables for ``--no-patch``.

    Raises:
        VllmopsError: ``patch.unknown``.
    """
    for patch in ids:
        require_patch(patch)
    return [f"{OFF}={','.join(ids)}"] if ids else []


def make_store_variables(
    url: str | None, max_size: int | None, max_per_key: int | None, ttl: str | None
) -> list[str]:
    """The environment variables for the store.

    Raises:
        VllmopsError: ``usage``.
    """
    if url == "":
        raise make_usage_error("--store must not be empty; --store none stores no responses")
    return format_variables(
        {
            STORE: url,
            MAX_SIZE: max_size,
            MAX_PER_KEY: max_per_key,
            TTL: ttl and f"{parse_duration(ttl):g}",
        }
    )


def find_serve_keyring(keyring: Path | None, env: Sequence[str]) -> KeyringSource:
    """Where the server will find its keys.

    Args:
        keyring: of ``--keyring``.
        env: the variables that options set, as ``K=V``.

    Raises:
        VllmopsError: ``usage``: ``--env`` has a key itself.
    """
    if any(word.startswith(f"{SIGNING_KEY}=") for word in env):
        raise make_usage_error(
            f"--env {SIGNING_KEY} would show the key to everybody who sees the command: "
            "export it before, or use --keyring"
        )
    return find_keyring_source({**os.environ, **parse_variables(env)}, keyring)


def make_keyring_variables(source: KeyringSource) -> list[str]:
    """The environment variable for keys: where they are, never the keys themselves."""
    return [] if source.text else [f"{KEYRING}={source}"]


def make_carrier_variables(
    form: CarrierFormat | None, ttl: str | None, env: Sequence[str]
) -> list[str]:
    """The environment variables for carriers.

    The lifetime is included even if it comes from this environment: `vllmops keys rotate` reads it
    from the record.

    Raises:
        VllmopsError: ``usage``.
    """
    given = {**os.environ, **parse_variables(env)}
    seconds = f"{parse_duration(ttl):g}" if ttl else given.get(CARRIER_TTL)
    return format_variables({CARRIER: form, CARRIER_TTL: seconds})


def make_admin_variables(token_path: Path | None) -> list[str]:
    """The environment variable for the admin token: where it is, never the token itself.

    Raises:
        VllmopsError: as `admin_token.read_admin_token` does.
    """
    if token_path is None:
        return []
    admin_token.read_admin_token(token_path)
    return [f"{ADMIN_TOKEN_FILE}={token_path.absolute()}"]


def make_compaction_variables(prompt: Path | None) -> list[str]:
    """The environment variable for the prompt of compactions.

    Raises:
        VllmopsError: ``file.unreadable`` or ``file.too-large``; ``usage`` if it has no prompt.
    """
    if prompt is None:
        return []
    try:
        text = read_input(prompt, MOST_PROMPT).decode()
    except UnicodeError as error:
        raise make_usage_error(f"--compaction-prompt {prompt} is not UTF-8") from error
    if not text.strip():
        raise make_usage_error(f"--compaction-prompt {prompt} is empty")
    return [f"{COMPACTION_PROMPT}={prompt.absolute()}"]


def make_websocket_variables(
    max_message: int | None, idle: str | None, max_requests: int | None, max_connections: int | None
) -> list[str]:
    """The environment variables for WebSockets; raises VllmopsError (``usage``)."""
    return format_variables(
        {
            SOCKET_MESSAGE: max_message,
            SOCKET_IDLE: idle and f"{parse_duration(idle):g}",
            SOCKET_REQUESTS: max_requests,
            SOCKET_CONNECTIONS: max_connections,
        }
    )


def format_variables(variables: Mapping[str, object]) -> list[str]:
    """Environment variables as ``--env`` takes them, without those that have no value."""
    return [f"{name}={value}" for name, value in variables.items() if value is not None]


def parse_variables(env: Sequence[str]) -> dict[str, str]:
    """The variables that ``--env`` sets; malformed ones are left out."""
    return dict(word.split("=", 1) for word in env if "=" in word)


def make_usage_error(message: str) -> VllmopsError:
    return VllmopsError("usage", message, "vllmops serve --help")
