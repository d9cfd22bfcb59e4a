"""The state of each patch in a server's processes, or in the vLLM of this environment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ...agent.patches.registry import PATCHES
from ...agent.versions.features import describe_untested_version
from ...collect.agents import agent_client
from ...model.caches import ProcessGap
from ...model.patches import PatchReport, PatchState, ProcessPatches
from ...model.ranks import format_process, make_process_fields
from ...model.roles import ROLES
from ...servers.discovery import resolve_server
from ...supervision.launch import require_vllm
from ...support.errors import VllmopsError
from ...support.output import Progress, make_table, style_text

if TYPE_CHECKING:
    from rich.console import RenderableType

TIMEOUT_S = 120.0  # to import vLLM; it usually takes 7 s
PROBED: dict[bool | None, tuple[str, str]] = {
    True: ("present", "bold red"),
    False: ("absent", "green"),
    None: ("not probed", "yellow"),
}
STYLES = {PatchState.FAILED: "bold red", PatchState.OFF: "yellow", PatchState.APPLIED: "green"}


def fetch_patches(
    target: str | None, *, verify: bool, quiet: bool
) -> tuple[list[ProcessPatches], list[ProcessGap]]:
    """The patches of a server's processes, or of this environment without a target.

    Returns:
        The patches by process, and the processes that did not answer.

    Raises:
        VllmopsError: ``patches.no-agent`` if no process answers, ``vllm.missing``,
            ``vllm.broken`` or ``vllm.slow``.
    """
    if target is None:
        return [inspect_local_patches(quiet=quiet)], []
    server = resolve_server(target)
    patches, silent = agent_client.collect_answers(
        server.select_processes(*ROLES),
        lambda process: agent_client.open_agent(process).fetch_patches(verify=verify),
    )
    if not patches:
        reasons = "; ".join(dict.fromkeys(process.reason for process in silent))
        raise VllmopsError(
            "patches.no-agent",
            f"no process of {server.label} reported its patches: {reasons or 'it has none yet'}",
            f"vllmops restart {server.label}",
        )
    return patches, silent


def inspect_local_patches(*, quiet: bool) -> ProcessPatches:
    """The patches of the vLLM in this environment, probed in a separate process."""
    require_vllm()
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


def build_patches_data(
    processes: Sequence[ProcessPatches], gaps: Sequence[ProcessGap]
) -> dict[str, Any]:
    """The data for ``--json``: by patch, then by process."""
    rows = []
    for name, patch in PATCHES.items():
        states = [
            {
                **make_process_fields(process),
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
        "problems": collect_problems(processes),
        "silent": gaps,
        "seconds": seconds,
    }


def collect_problems(processes: Sequence[ProcessPatches]) -> list[str]:
    """What the agents can't do, and which versions are newer than those tested; each once."""
    common = dict.fromkeys(problem for process in processes for problem in process.problems)
    newer = filter(None, (describe_untested_version(process.vllm_version) for process in processes))
    return [*common, *(remark for remark in dict.fromkeys(newer) if remark not in " ".join(common))]


def render_patches(
    processes: Sequence[ProcessPatches],
    gaps: Sequence[ProcessGap],
    *,
    verify: bool = False,
) -> list[RenderableType]:
    """A table with a line for each patch and state, and the processes in that state."""
    versions = sorted({process.vllm_version or "unknown version" for process in processes})
    shown = make_table("patch", "defect" if verify else "state", "processes")
    reasons: dict[str, dict[str, None]] = {}  # with the patches that have it
    for name in PATCHES:
        groups: dict[tuple[str, str], list[str]] = {}
        for process in processes:
            for verdict in process.patches:
                if verdict.id != name:
                    continue
                where = process.role if process.role == "here" else format_process(process)
                groups.setdefault(format_state(verdict, verify), []).append(where)
                if verdict.reason:
                    reasons.setdefault(verdict.reason, {})[name] = None
        for (word, style), names in groups.items():
            shown.add_row(name, style_text(word, style), ", ".join(names))
        if not groups:
            shown.add_row(name, "no process has loaded it", "")
    notes = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    notes += collect_problems(processes)
    notes += [f"{format_process(process)} did not answer: {process.reason}" for process in gaps]
    return [f"vLLM {', '.join(versions)}", "", shown, *notes]


def format_state(report: PatchReport, verify: bool) -> tuple[str, str]:
    """A state for a person, and its style."""
    if not verify:
        return report.state, STYLES.get(report.state, "")
    result, style = PROBED[report.present]
    return f"{result} ({report.state})", style
