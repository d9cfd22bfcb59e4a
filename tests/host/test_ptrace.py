import os

import pytest

from vllmops.host.ptrace import CAP_SYS_PTRACE, Rights, refusal, rights

ALL = CAP_SYS_PTRACE | 1


def test_rights_over_this_process() -> None:
    found = rights(os.getpid())
    assert found.uid == found.target_uid == os.geteuid()
    assert found.bounding & found.effective == found.effective
    assert found.ptrace_scope in {0, 1, 2, 3}


# The kernels to meet are many, and Yama, seccomp and user namespaces are not ours to set here.
@pytest.mark.parametrize(
    ("given", "code", "hint"),
    [
        (Rights(1000, 1000, 0, ALL, ptrace_scope=1), "stacks.ptrace-scope", "sudo sysctl"),
        (Rights(1000, 1000, 0, ALL, ptrace_scope=2), "stacks.ptrace-scope", "sudo sysctl"),
        (Rights(0, 0, ALL, ALL, ptrace_scope=3), "stacks.ptrace-scope", "reboot"),
        (Rights(1000, 1000, 0, 1, ptrace_scope=1), "stacks.ptrace-scope", "--cap-add SYS_PTRACE"),
        (Rights(1000, 0, 0, ALL), "stacks.other-user", "sudo env"),
        (Rights(1000, 0, 0, ALL, ptrace_scope=1), "stacks.other-user", "sudo env"),
        (Rights(0, 54321, 1, 1), "stacks.other-user", "setpriv --reuid=54321"),
        (Rights(1000, 0, 0, 1), "stacks.other-user", "docker exec -u 0"),
        (Rights(1000, 1000, 0, ALL), "stacks.no-capability", "sudo env"),
        (Rights(0, 0, 1, 1), "stacks.no-capability", "--cap-add SYS_PTRACE"),
        (Rights(0, 0, ALL, ALL, seccomp=True), "stacks.seccomp", "seccomp=unconfined"),
        (Rights(0, 0, ALL, ALL), "stacks.refused", "docker exec CONTAINER"),
    ],
)
def test_a_refusal_names_its_reason_and_the_way_out(given: Rights, code: str, hint: str) -> None:
    error = refusal(42, given)
    assert error.code == code
    assert "42" in error.message
    assert hint in error.hint
