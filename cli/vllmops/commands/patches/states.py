"""The state of each patch in a server's processes, or in the vLLM of this environment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ...agent.adapters.features import untested
from ...agent.patches.registry import PATCHES
from ...errors import VllmopsError
from ...host.processes import ROLES
from ...instances.launch import check_installed
from ...instances.servers import resolve
from ...output import Progress, styled, table
from ...protocol.caches import Silent
from ...protocol.patches import ProcessPatches, State, Verdict
from ...protocol.place import row, who
from ...rpc import agent

if TYPE_CHECKING:
    from rich.console import RenderableType

TIMEOUT_S = 120.0  # to import vLLM; it usually takes 7 s
PROBED: dict[bool | None, tuple[str, str]] = {
    True: ("present", "bold red"),
    False: ("absent", "green"),
    None: ("not probed", "yellow"),
}
STYLES = {State.FAILED: "bold red", State.OFF: "yellow", State.APPLIED: "green"}


def asked(
    target: str | None, *, verify: bool, quiet: bool
) -> tuple[list[ProcessPatches], list[Silent]]:
    """The patches of a server's processes, or of this environment without a target.

    Returns:
        The patches by process, and the processes that did not answer.

    Raises:
        VllmopsError: ``patches.no-agent`` if no process answers, ``vllm.missing``,
            ``vllm.broken`` or ``vllm.slow``.
    """
    if target is None:
        return [here(quiet=quiet)], []
    server = resolve(target)
    patches, silent = agent.side_by_side(
        server.of(*ROLES),
        lambda process: agent.reach(process).patches(verify=verify),
    )
    if not patches:
        reasons = "; ".join(dict.fromkeys(process.why for process in silent))
        raise VllmopsError(
            "patches.no-agent",
            f"no process of {server.label} reported its patches: {reasons or 'it has none yet'}",
            f"vllmops restart {server.label}",
        )
    return patches, silent


def here(*, quiet: bool) -> ProcessPatches:
    """The patches of the vLLM in this environment, probed in a separate process."""
    check_installed()
    words = (sys.executable, "-P", "-m", "vllmops.agent.patches")
    # This process is no server, so it must not start an agent.
    environment = {**os.environ, "VLLMOPS_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        with Progress(time.time(), quiet=quiet) as progress:
            progress.update("importing vLLM to probe it")
            done = subprocess.run(
                words, env=environment, capture_output=True, check=False, timeout=TIMEOUT_S
            )
    except subprocess.TimeoutExpired as error:
        raise VllmopsError(
            "vllm.slow",
            f"the import of vLLM took longer than {TIMEOUT_S:.0f} s",
            f"{sys.executable} -c 'import vllm'",
        ) from error
    try:
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=ProcessPatches)
    except (IndexError, msgspec.MsgspecError) as error:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise VllmopsError(
            "vllm.broken",
            f"vLLM can't be imported here: {' '.join(last) or f'exit code {done.returncode}'}",
            f"{sys.executable} -c 'import vllm'",
        ) from error


def report(processes: Sequence[ProcessPatches], silent: Sequence[Silent]) -> dict[str, Any]:
    """The data for ``--json``: by patch, then by process."""
    rows = []
    for name, patch in PATCHES.items():
        states = [
            {
                **row(process),
                "state": verdict.state,
                "reason": verdict.reason,
                "present": verdict.present,
            }
            for process in processes
            for verdict in process.patches
            if verdict.id == name
        ]
        rows.append(
            {"id": name, "upstream": patch.upstream, "title": patch.title, "processes": states}
        )
    versions = sorted({process.vllm_version or "unknown" for process in processes})
    seconds = {str(process.pid): process.seconds for process in processes}
    return {
        "vllm_versions": versions,
        "patches": rows,
        "problems": problems(processes),
        "silent": silent,
        "seconds": seconds,
    }


def problems(processes: Sequence[ProcessPatches]) -> list[str]:
    """What the agents can't do, and which versions are newer than those tested; each once."""
    common = dict.fromkeys(problem for process in processes for problem in process.problems)
    newer = filter(None, (untested(process.vllm_version) for process in processes))
    return [*common, *(remark for remark in dict.fromkeys(newer) if remark not in " ".join(common))]


def listing(
    processes: Sequence[ProcessPatches],
    silent: Sequence[Silent],
    *,
    verify: bool = False,
) -> list[RenderableType]:
    """A table with a line for each patch and state, and the processes in that state."""
    versions = sorted({process.vllm_version or "unknown version" for process in processes})
    shown = table("patch", "defect" if verify else "state", "processes")
    reasons: dict[str, dict[str, None]] = {}  # with the patches that have it
    for name in PATCHES:
        groups: dict[tuple[str, str], list[str]] = {}
        for process in processes:
            for verdict in process.patches:
                if verdict.id != name:
                    continue
                where = process.role if process.role == "here" else who(process)
                groups.setdefault(state(verdict, verify), []).append(where)
                if verdict.reason:
                    reasons.setdefault(verdict.reason, {})[name] = None
        for (word, style), names in groups.items():
            shown.add_row(name, styled(word, style), ", ".join(names))
        if not groups:
            shown.add_row(name, "no process has loaded it", "")
    notes = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    notes += problems(processes)
    notes += [f"{who(process)} did not answer: {process.why}" for process in silent]
    return [f"vLLM {', '.join(versions)}", "", shown, *notes]


def state(verdict: Verdict, verify: bool) -> tuple[str, str]:
    """A state for a person, and its style."""
    if not verify:
        return verdict.state, STYLES.get(verdict.state, "")
    result, style = PROBED[verdict.present]
    return f"{result} ({verdict.state})", style
