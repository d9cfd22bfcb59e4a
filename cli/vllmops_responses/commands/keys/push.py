"""``vllmops keys push``: send the keys to a server that does not share the file."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from vllmops.collect.agents import admin_token as admin
from vllmops.commands.options import AdminToken, Target
from vllmops.model.admin_api import KEYS
from vllmops.model.keys import ProcessKeys
from vllmops.model.snapshot_files import DAMAGE
from vllmops.support import output
from vllmops.support.errors import VllmopsError, make_usage_error
from vllmops.support.numbers import format_count
from vllmops.support.output import Result, print_result

from ...keys import keyring_file
from ...keys.keyring import KeyRing, KeyStatus
from .keyring_options import Keyring, find_keyring_path

if TYPE_CHECKING:
    from vllmops.collect.http.endpoint import Endpoint


@print_result
def push(
    *,
    target: Target = None,
    admin_token: AdminToken = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Allow plain HTTP, without TLS, to another machine.")
    ] = False,
    keyring: Keyring = None,
    json_: output.Json = False,
) -> Result:
    """Send the keys to a server that does not share the file.

    The server adds them to its own keyring, keeps its own keys, and seals with
    the same primary from then on. All its processes load them within 2 s. To
    rotate without refused requests: add, push to each server, rotate, push to
    each server again.
    """
    from vllmops.servers.target_endpoint import resolve_endpoint  # noqa: PLC0415

    if admin_token is None:
        raise make_usage_error(
            "the server's admin token is required",
            "--admin-token FILE: the file given to vllmops serve",
        )
    ring = keyring_file.load_keyring(find_keyring_path(keyring)).without_expired(time.time())
    token, server = admin.read_admin_token(admin_token), resolve_endpoint(target)
    held = push_keyring(server, token, ring, allow_plain_http=plain)
    if lacks := describe_missing_keys(ring, held):
        raise VllmopsError(
            "keys.not-taken",
            f"{server.name} {lacks}" + (f" ({held.problem})" if held.problem else ""),
            "run vllmops keys status on that machine",
            data=msgspec.to_builtins(held),
        )
    text = f"{server.name} has {format_count(len(held.keys), 'key')} in {held.keyring}"
    sealing = f", and seals with {ring.primary.kid}" if ring.primary else ""
    data = {"server": server.name, "url": server.url, **msgspec.to_builtins(held)}
    return Result(data, lambda: [text + sealing])


def push_keyring(
    endpoint: Endpoint, token: str, keyring: KeyRing, *, allow_plain_http: bool = False
) -> ProcessKeys:
    """Give a server a ring.

    Args:
        endpoint: the server.
        token: its admin token.
        keyring: the keys, with their secrets.
        allow_plain_http: send them over HTTP without TLS to another machine.

    Returns:
        What the process that answered holds now.

    Raises:
        VllmopsError: as `AdminClient` and `AdminClient.send_request` do, ``admin.refused`` (4),
            ``admin.no-route``, or the server's own error.
    """
    from vllmops.collect.agents.agent_client import DECODERS  # noqa: PLC0415 - slow
    from vllmops.collect.http.admin_client import AdminClient  # noqa: PLC0415 - brings httpx

    server = AdminClient(endpoint, token, allow_plain_http=allow_plain_http)
    answer = server.send_request("POST", KEYS, content=keyring_file.encode_keyring(keyring))
    if answer.is_success:
        try:
            held: ProcessKeys = DECODERS[ProcessKeys].decode(answer.content)
            return held
        except DAMAGE:
            pass
    raise server.make_answer_error(answer)


def describe_missing_keys(keyring: KeyRing, process_keys: ProcessKeys) -> str:
    """Which part of a ring a process has not loaded, in words; empty if it has all."""
    statuses = {key.fingerprint: key.status for key in process_keys.keys}
    if missing := [key.kid for key in keyring.keys if key.fingerprint not in statuses]:
        return f"has not loaded {', '.join(missing)}"
    if keyring.primary and (status := statuses[keyring.primary.fingerprint]) != KeyStatus.PRIMARY:
        return f"has {keyring.primary.kid}, the primary here, as {status}"
    return ""
