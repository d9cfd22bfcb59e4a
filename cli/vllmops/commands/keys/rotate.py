"""``vllmops keys rotate``: replace the primary key without an outage."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ... import output
from ...errors import Exit, VllmopsError
from ...instances import keys as client
from ...keys import file, rotation
from ...keys.ring import Key, Ring, Status, fresh, in_seconds, when
from ...output import Progress, Result, command
from ...protocol.place import who
from ..options import DryRun, seconds
from .keyring import Keyring, Overlap, result, ring_path
from .servers import Period, after, not_loaded, period

POLL_S = 0.3


@command
def rotate(
    *,
    overlap: Overlap = None,
    timeout: Annotated[
        float,
        typer.Option(
            parser=seconds(), help="Seconds to wait until every server has loaded the new key."
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
    in_seconds("--timeout", timeout)
    path = ring_path(keyring)
    overlap_period = period(overlap, path)
    spare = Key.of(fresh(), Status.NEXT, time.time())
    if dry_run:
        steps = plan(path, spare, overlap_period)
        return Result(
            {"keyring": str(path), "overlap_s": overlap_period.seconds, "steps": steps},
            lambda: [f"{n}. {step}" for n, step in enumerate(steps, 1)],
        )
    ring = file.change(path, lambda ring: rotation.begin(ring, spare, time.time()), create=True)
    assert ring.next
    kid = ring.next.kid
    with Progress(time.time(), quiet=json_) as progress:
        wait(path, kid, timeout, progress)
    ring = file.change(
        path, lambda ring: rotation.finish(ring, kid, time.time(), overlap_period.seconds)
    )
    more, notes = after(path, ring)
    return result(ring, str(path), {"kid": kid, **more}, notes)


def plan(path: Path, spare: Key, overlap_period: Period) -> list[str]:
    """The steps of a rotation, in words."""
    now = time.time()
    ring = file.load(path) if path.exists() else Ring()
    begun = rotation.begin(ring, spare, now)
    holdings = client.ask(ring=path).of(path)
    steps = [f"remove {key.kid}: its time is over" for key in ring.keys if not begun.find(key.kid)]
    steps.append(
        f"continue with {coming.kid}, the next key"
        if (coming := ring.without_over(now).next)
        else "add a fresh key as next"
    )
    if not holdings.reported and not holdings.silent:
        steps.append("no wait: no running server uses this keyring")
    else:
        waited = [process.who for process in holdings.reported]
        waited += [f"{server} {who(process)}" for server, process in holdings.silent]
        steps.append(f"wait until these processes have loaded it: {', '.join(waited)}")
    steps.append("promote it")
    if ring.primary:
        until = when(now + overlap_period.seconds)
        steps.append(f"keep {ring.primary.kid} as verify-only until {until}: {overlap_period.why}")
    return steps


def wait(path: Path, kid: str, timeout_s: float, progress: Progress) -> None:
    """Wait until every server that follows a ring holds a key.

    Raises:
        VllmopsError: ``keys.not-loaded`` (exit code 3); the key stays next.
    """
    deadline = time.monotonic() + timeout_s
    while why := not_loaded(path, kid):
        if time.monotonic() > deadline:
            raise VllmopsError(
                "keys.not-loaded",
                f"not every server loaded {kid} within {timeout_s:g} s, so it stays next: "
                + "; ".join(why),
                "fix these servers, then continue with vllmops keys rotate",
                exit_code=Exit.TIMED_OUT,
            )
        progress.update(f"waiting for {len(why)} to load {kid}: {why[0]}")
        time.sleep(POLL_S)
