"""Why the kernel does not allow reading another process, and what to do.

The rules are those of ptrace(2), "Ptrace access mode checking", and of Yama.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...support.errors import VllmopsError
from ...support.home import format_user
from .proc import read_lossy_text, read_status

CAP_SYS_PTRACE = 1 << 19


@dataclass(frozen=True)
class PtraceRights:
    """What the kernel's decision depends on.

    Args:
        uid: effective user id of this process.
        target_uid: the other process's.
        effective: capabilities of this process, as a bit mask.
        bounding: those that this process or its children could ever get; a container or a systemd
            unit limits it.
        ptrace_scope: ``kernel.yama.ptrace_scope``, 0 if there is no Yama.
        seccomp: whether a filter checks the system calls of this process.
    """

    uid: int
    target_uid: int
    effective: int
    bounding: int
    ptrace_scope: int = 0
    seccomp: bool = False


def read_rights(pid: int) -> PtraceRights:
    """The rights of this process over another; reading them needs none.

    Raises:
        OSError: the process is gone.
    """
    ours, theirs = read_status("self"), read_status(str(pid))
    try:
        scope = int(read_lossy_text(Path("/proc/sys/kernel/yama/ptrace_scope")))
    except OSError:
        scope = 0
    return PtraceRights(
        uid=os.geteuid(),
        target_uid=int(theirs["Uid"].split()[1]),
        effective=int(ours["CapEff"], 16),
        bounding=int(ours["CapBnd"], 16),
        ptrace_scope=scope,
        seccomp=ours.get("Seccomp", "0") != "0",
    )


def make_refusal_error(
    pid: int,
    rights: PtraceRights,
    command: Literal["stacks dump", "attach", "status"] = "stacks dump",
) -> VllmopsError:
    """The error for a process that the kernel does not allow reading.

    Args:
        pid: process id.
        rights: over it.
        command: that was typed.

    Returns:
        One of ``stacks.ptrace-scope``, ``stacks.other-user``, ``stacks.no-capability``,
        ``stacks.seccomp`` and ``stacks.refused``; the first word is the command's.
    """
    attach = command == "attach"
    again = f"vllmops {command} -t {pid}"
    as_root = f'sudo env "PATH=$PATH" {again}'
    reachable = bool(rights.bounding & CAP_SYS_PTRACE)
    grant = (
        "start the container with --cap-add SYS_PTRACE (Kubernetes: securityContext.capabilities"
        f".add: [SYS_PTRACE]), or run it on the host: {as_root}"
    )
    if rights.ptrace_scope >= 3:
        return VllmopsError(
            "attach.ptrace-scope" if attach else "stacks.ptrace-scope",
            f"no process may read pid {pid}: kernel.yama.ptrace_scope is 3, until a reboot",
            "set kernel.yama.ptrace_scope = 1 in /etc/sysctl.d and reboot",
        )
    if rights.effective & CAP_SYS_PTRACE:
        if rights.seccomp:
            return VllmopsError(
                "attach.seccomp" if attach else "stacks.seccomp",
                f"a seccomp filter, probably the container's, forbids reading pid {pid}",
                "start the container with --security-opt seccomp=unconfined, or run it on the"
                f" host: {as_root}",
            )
        return VllmopsError(
            "attach.refused" if attach else "stacks.refused",
            f"the kernel does not allow reading pid {pid}, even with CAP_SYS_PTRACE: it is in"
            " another user namespace, or a security module (SELinux, AppArmor) forbids it",
            f"run it in the server's own container: docker exec CONTAINER {again}",
        )
    if rights.uid != rights.target_uid:
        owner = format_user(rights.target_uid)
        if reachable:
            hint = as_root
        elif rights.uid == 0:
            hint = f"setpriv --reuid={rights.target_uid} --clear-groups {again}"
        else:
            hint = f"docker exec -u {rights.target_uid} CONTAINER {again}, or {grant}"
        return VllmopsError(
            "attach.other-user" if attach else "stacks.other-user",
            f"pid {pid} belongs to {owner} and you are {format_user(rights.uid)}, without "
            "CAP_SYS_PTRACE",
            hint,
        )
    if rights.ptrace_scope:
        only = "its ancestors" if rights.ptrace_scope == 1 else "root"
        return VllmopsError(
            "attach.ptrace-scope" if attach else "stacks.ptrace-scope",
            f"only {only} may read pid {pid}: kernel.yama.ptrace_scope is {rights.ptrace_scope}",
            f"{as_root}, or permanently: sudo sysctl kernel.yama.ptrace_scope=0"
            if reachable
            else f"sudo sysctl kernel.yama.ptrace_scope=0 on the host, or {grant}",
        )
    return VllmopsError(
        "attach.no-capability" if attach else "stacks.no-capability",
        f"pid {pid} has more privileges than {'this process' if reachable else 'this container'}: "
        "reading it needs CAP_SYS_PTRACE",
        as_root if reachable else grant,
    )
