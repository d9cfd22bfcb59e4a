import os

import pytest

from vllmops.collect.machine.ptrace_permission import (
    CAP_SYS_PTRACE,
    PtraceRights,
    make_refusal_error,
    read_rights,
)

ALL = CAP_SYS_PTRACE | 1


def test_rights_over_this_process() -> None:
    found = read_rights(os.getpid())
    assert found.uid == found.target_uid == os.geteuid()
    assert found.bounding & found.effective == found.effective
    assert found.ptrace_scope in {0, 1, 2, 3}


# The kernels to meet are many, and Yama, seccomp and user namespaces are not ours to set here.
@pytest.mark.parametrize(
    ("given", "code", "hint"),
    [
        (PtraceRights(1000, 1000, 0, ALL, ptrace_scope=1), "stacks.ptrace-scope", "sudo sysctl"),
        (PtraceRights(1000, 1000, 0, ALL, ptrace_scope=2), "stacks.ptrace-scope", "sudo sysctl"),
        (PtraceRights(0, 0, ALL, ALL, ptrace_scope=3), "stacks.ptrace-scope", "reboot"),
        (
            PtraceRights(1000, 1000, 0, 1, ptrace_scope=1),
            "stacks.ptrace-scope",
            "--cap-add SYS_PTRACE",
        ),
        (PtraceRights(1000, 0, 0, ALL), "stacks.other-user", "sudo env"),
        (PtraceRights(1000, 0, 0, ALL, ptrace_scope=1), "stacks.other-user", "sudo env"),
        (PtraceRights(0, 54321, 1, 1), "stacks.other-user", "setpriv --reuid=54321"),
        (PtraceRights(1000, 0, 0, 1), "stacks.other-user", "docker exec -u 0"),
        (PtraceRights(1000, 1000, 0, ALL), "stacks.no-capability", "sudo env"),
        (PtraceRights(0, 0, 1, 1), "stacks.no-capability", "--cap-add SYS_PTRACE"),
        (PtraceRights(0, 0, ALL, ALL, seccomp=True), "stacks.seccomp", "seccomp=unconfined"),
        (PtraceRights(0, 0, ALL, ALL), "stacks.refused", "docker exec CONTAINER"),
    ],
)
def test_a_refusal_names_its_reason_and_the_way_out(
    given: PtraceRights, code: str, hint: str
) -> None:
    error = make_refusal_error(42, given)
    assert error.code == code
    assert "42" in error.message
    assert hint in error.hint
