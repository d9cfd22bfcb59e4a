"""``vllmops keys rotate``: replace the primary key without an outage."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from vllmops.commands.options import DryRun, make_seconds_parser
from vllmops.model.ranks import format_process
from vllmops.support import output
from vllmops.support.durations import format_utc_time, validate_seconds
from vllmops.support.errors import ExitCode, VllmopsError
from vllmops.support.output import Progress, Result, print_result

from ...keys import keyring_file, rotation
from ...keys.keyring import Key, KeyRing, KeyStatus, generate_secret
from . import loaded_keys
from .keyring_options import Keyring, Overlap, find_keyring_path, make_keyring_result
from .keys_in_use import (
    OverlapPeriod,
    choose_overlap_period,
    collect_load_status,
    describe_not_loaded,
)

POLL_S = 0.3


@print_result
def rotate(
    *,
    overlap: Overlap = None,
    timeout: Annotated[
        float,
        typer.Option(
            parser=make_seconds_parser(),
            help="Seconds to wait until every server has loaded the new key.",
        ),
    ] = 30.0,
    dry_run: DryRun = False,
    keyring: Keyring = None,
    json_: output.Json = False,
) -> Result:
    """Replace the primary with a fresh key, without breaking conversations.

    The command adds a key, waits until every running server that uses the
    keyring has loaded it, and promotes it. The old primary stays verify-only
    until the overlap ends; keys whose overlap has ended are removed. An
    interrupted rotation continues; two at the same time act as one.
    """
    validate_seconds("--timeout", timeout)
    path = find_keyring_path(keyring)
    overlap_period = choose_overlap_period(overlap, path)
    spare = Key.from_secret(generate_secret(), KeyStatus.NEXT, time.time())
    if dry_run:
        steps = plan_rotation(path, spare, overlap_period)
        return Result(
            {"keyring": str(path), "overlap_s": overlap_period.seconds, "steps": steps},
            lambda: [f"{n}. {step}" for n, step in enumerate(steps, 1)],
        )
    ring = keyring_file.change_keyring(
        path, lambda ring: rotation.begin_rotation(ring, spare, time.time()), create=True
    )
    assert ring.next_key
    kid = ring.next_key.kid
    with Progress(time.time(), quiet=json_) as progress:
        wait_until_loaded(path, kid, timeout, progress)
    ring = keyring_file.change_keyring(
        path, lambda ring: rotation.finish_rotation(ring, kid, time.time(), overlap_period.seconds)
    )
    more, notes = collect_load_status(path, ring)
    return make_keyring_result(ring, str(path), {"kid": kid, **more}, notes)


def plan_rotation(path: Path, spare: Key, overlap_period: OverlapPeriod) -> list[str]:
    """The steps of a rotation, in words."""
    now = time.time()
    ring = keyring_file.load_keyring(path) if path.exists() else KeyRing()
    begun = rotation.begin_rotation(ring, spare, now)
    holdings = loaded_keys.collect_keyring_users(keyring_path=path).select_by_keyring(path)
    steps = [f"remove {key.kid}: its time is over" for key in ring.keys if not begun.find(key.kid)]
    steps.append(
        f"continue with {coming.kid}, the next key"
        if (coming := ring.without_expired(now).next_key)
        else "add a fresh key as next"
    )
    if not holdings.users and not holdings.gaps:
        steps.append("no wait: no running server uses this keyring")
    else:
        waited = [process.display_name for process in holdings.users]
        waited += [f"{server} {format_process(process)}" for server, process in holdings.gaps]
        steps.append(f"wait until these processes have loaded it: {', '.join(waited)}")
    steps.append("promote it")
    if ring.primary:
        until = format_utc_time(now + overlap_period.seconds)
        steps.append(
            f"keep {ring.primary.kid} as verify-only until {until}: {overlap_period.reason}"
        )
    return steps


def wait_until_loaded(path: Path, kid: str, timeout_s: float, progress: Progress) -> None:
    """Wait until every server that follows a ring holds a key.

    Raises:
        VllmopsError: ``keys.not-loaded`` (exit code 3); the key stays next.
    """
    deadline = time.monotonic() + timeout_s
    while why := describe_not_loaded(path, kid):
        if time.monotonic() > deadline:
            raise VllmopsError(
                "keys.not-loaded",
                f"not every server loaded {kid} within {timeout_s:g} s, so it stays next: "
                + "; ".join(why),
                "fix these servers, then continue with vllmops keys rotate",
                exit_code=ExitCode.TIMED_OUT,
            )
        progress.update(f"waiting for {len(why)} to load {kid}: {why[0]}")
        time.sleep(POLL_S)
