"""Who belongs to a vLLM server, and what each one does: told from process tables."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllmops.collect.machine import memory, proc
from vllmops.collect.machine.process_states import observe_process
from vllmops.collect.machine.processes import (
    Process,
    ProcessEntry,
    Table,
    build_process_tree,
    is_alive,
    parse_serve_arguments,
    read_process_table,
    retain_vital_processes,
)
from vllmops.model import process_identity
from vllmops.model.roles import Role


def process_table(*rows: tuple[int, int, str]) -> Table:
    """A table from pid, parent and command line."""
    return {
        pid: ProcessEntry(pid, ppid, 1000 + pid, tuple(words.split()), pid * 10, words == "zombie")
        for pid, ppid, words in rows
    }


def roles(found: Table, *roots: int) -> dict[int, str]:
    return {process.pid: process.role.value for process in build_process_tree(found, roots)}


VLLM_SERVE = "/x/bin/python /x/bin/vllm serve M --port 1"


def test_roles_are_derived_for_a_single_api_server() -> None:
    found = process_table(
        (1, 0, "init"),
        (10, 1, VLLM_SERVE),
        (11, 10, "python -c from_multiprocessing_import_resource_tracker"),
        (12, 10, "VLLM::EngineCore"),
        (13, 12, "VLLM::Worker"),
        (20, 1, "python other.py"),
    )
    assert roles(found, 10) == {10: "api", 11: "other", 12: "engine", 13: "worker"}


def test_several_api_servers_and_engines_below_a_launcher() -> None:
    found = process_table(
        (10, 1, "python -m vllmops.agent.launch serve M --api-server-count 2"),
        (12, 10, "VLLM::EngineCore_DP0"),
        (13, 10, "VLLM::EngineCore_DP1"),
        (14, 10, "VLLM::DPCoordinator"),
        (15, 10, "VLLM::APIServer_0"),
        (16, 10, "VLLM::APIServer_1"),
        (17, 12, "VLLM::Worker_TP0"),
        (18, 12, "VLLM::Worker_TP1"),
    )
    assert roles(found, 10) == {
        10: "launcher",
        12: "engine",
        13: "engine",
        14: "coordinator",
        15: "api",
        16: "api",
        17: "worker",
        18: "worker",
    }


def test_a_fork_that_has_executed_nothing_yet_is_none_of_them() -> None:
    found = process_table(
        (10, 1, VLLM_SERVE),
        (11, 10, VLLM_SERVE),
        (12, 10, "VLLM::EngineCore"),
        (13, 12, "VLLM::EngineCore"),
        (14, 12, "VLLM::Worker"),
        (15, 14, "VLLM::Worker"),
    )
    expected = {10: "api", 11: "other", 12: "engine", 13: "other", 14: "worker", 15: "other"}
    assert roles(found, 10) == expected
    assert roles(found, 15, 13, 11, 10) == expected


def test_titles_as_setproctitle_pads_them() -> None:
    found = process_table((10, 1, VLLM_SERVE))
    found[12] = ProcessEntry(12, 10, 1012, ("VLLM::EngineCore", "", "", ""), 1, zombie=False)
    assert [(p.role, p.title) for p in build_process_tree(found, [12])] == [
        (Role.ENGINE, "VLLM::EngineCore")
    ]


def test_zombies_are_not_of_it() -> None:
    found = process_table((10, 1, VLLM_SERVE), (12, 10, "zombie"), (13, 10, "VLLM::EngineCore"))
    assert roles(found, 10) == {10: "api", 13: "engine"}


def test_a_process_that_is_dying_keeps_the_role_that_it_had() -> None:
    before = process_table(
        (10, 1, VLLM_SERVE), (11, 10, "sh"), (12, 10, "VLLM::EngineCore"), (13, 12, "VLLM::Worker")
    )
    # As the kernel shows them: one has lost its memory, and the one below it its parent.
    after = process_table((10, 1, VLLM_SERVE), (12, 10, ""), (14, 10, "sh"))
    found = retain_vital_processes(
        build_process_tree(before, [10]), build_process_tree(after, [10])
    )
    shown = {process.pid: process.role.value for process in found}
    assert shown == {10: "api", 12: "engine", 14: "other", 13: "worker"}


def test_several_roots_and_unknown_ones() -> None:
    found = process_table((12, 1, "VLLM::EngineCore"), (13, 1, "VLLM::Worker"))
    assert roles(found, 12, 13, 99) == {12: "engine", 13: "worker"}


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("/x/bin/python /x/bin/vllm serve M --port 1", ["M", "--port", "1"]),
        ("/x/bin/python3.11 -u /x/bin/vllm serve M", ["M"]),
        ("vllm serve", []),
        ("/x/bin/vllm serve --model M", ["--model", "M"]),
        ("python -m vllm.entrypoints.openai.api_server --model M", ["--model", "M"]),
        ("python3 -m vllm.entrypoints.cli.main serve M", ["M"]),
        ("python -m vllm.frontend.entrypoints.openai.api_server --model M", ["--model", "M"]),
        ("python -m vllm.frontend.entrypoints.launchers.api_server.entry", []),
        ("python -m vllm.frontend.entrypoints.cli.main serve M", ["M"]),
        ("python -m vllm.frontend.entrypoints.cli.main bench serve", None),
        ("python -m vllm.entrypoints.launchers.render.entry M", None),
        ("python -m vllmops.agent.launch serve M", ["M"]),
        ("python -X dev -B -m vllmops.agent.launch serve M", ["M"]),
        ("python -m vllmops.agent.launch bench M", None),
        ("vllm bench serve", None),
        ("vllm", None),
        ("bash -c vllm serve M", None),
        ("sh -c exec vllm serve M", None),
        ("tail -f vllm serve", None),
        ("vim vllm serve", None),
        ("python serve.py vllm serve", None),
        ("python -m vllmops serve M", None),
        ("python -m pytest vllm serve", None),
        ("grep -m vllm.entrypoints.openai.api_server", None),
        ("", None),
    ],
)
def test_which_command_lines_are_servers(words: str, arguments: list[str] | None) -> None:
    for line in (words.split(), tuple(words.split())):
        found = parse_serve_arguments(line)
        assert (None if found is None else list(found)) == arguments


def test_a_shell_that_quotes_the_command_is_no_server() -> None:
    assert parse_serve_arguments(("bash", "-c", "vllm serve M")) is None
    assert parse_serve_arguments(("/usr/bin/env", "bash", "-c", "vllm serve")) is None


def test_a_pid_that_was_reused_is_another_process() -> None:
    created = process_identity.read_identity(os.getpid()).start_ticks
    assert is_alive(Process(Role.API, os.getpid(), created))
    assert not is_alive(Process(Role.API, os.getpid(), created - 60))
    assert not is_alive(Process(Role.API, 2**22 + 1, created))


def test_a_zombie_is_not_alive() -> None:
    popen = subprocess.Popen([sys.executable, "-S", "-c", ""])
    created = process_identity.read_identity(popen.pid).start_ticks
    os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
    assert read_process_table()[popen.pid].zombie
    assert not is_alive(Process(Role.API, popen.pid, created))
    popen.wait()


def test_the_real_table_has_this_process() -> None:
    seen = read_process_table()[os.getpid()]
    assert seen.ppid == os.getppid()
    assert seen.rss_bytes
    assert seen.rss_bytes > 2**20
    assert not seen.zombie


def test_a_process_with_a_name_that_is_no_text() -> None:
    name = "import ctypes; ctypes.CDLL(None).prctl(15, b'\\xff\\xfe'); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout
        child.stdout.readline()
        assert proc.read_effective_uid(child.pid) == os.geteuid()
        assert proc.read_process_name(child.pid) == "\ufffd\ufffd"
        assert process_identity.read_identity(child.pid).pid == child.pid
        child.communicate(b"\n")


@pytest.mark.parametrize(
    ("title", "ranks", "fields"),
    [
        ("VLLM::Worker", "", (None, None, None)),
        ("VLLM::Worker_TP1", "TP1", (None, 1, None)),
        ("VLLM::Worker_DP0_PP1_TP3_EP3", "DP0 TP3 PP1", (0, 3, 1)),
        ("VLLM::EngineCore_DP12", "DP12", (12, None, None)),
        ("VLLM::DPCoordinator", "", (None, None, None)),
        ("VLLM::APIServer_1", "", (None, None, None)),
        (VLLM_SERVE.replace("M", "model_TP2"), "", (None, None, None)),
    ],
)
def test_ranks_are_in_the_titles(
    title: str, ranks: str, fields: tuple[int | None, int | None, int | None]
) -> None:
    (process,) = build_process_tree(process_table((10, 1, title)), [10])
    place = process.place
    assert place.ranks == ranks
    assert (place.dp_rank, place.tp_rank, place.pp_rank) == fields


def test_observe_process_ignores_a_reused_pid() -> None:
    ticks = process_identity.read_identity(os.getpid()).start_ticks
    assert observe_process(Process(Role.ENGINE, os.getpid(), ticks)).state in {"R", "S", "D"}
    other = observe_process(Process(Role.ENGINE, os.getpid(), ticks - 1))
    assert (other.state, other.rss_bytes) == ("", None)


def test_the_least_memory_of_all_control_groups_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limit(group: Path, most: str, used: int, inactive: int = 0) -> None:
        group.mkdir()
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")

    pod = tmp_path / "pod"
    limit(pod, "1000", 900, 50)
    limit(pod / "server", "max", 300)
    monkeypatch.setattr(proc, "find_cgroup", lambda _: pod / "server")
    assert memory.find_cgroup_limit_and_available(os.getpid()) == (1000, 150)
    (pod / "server" / "memory.max").write_text("400\n")
    assert memory.find_cgroup_limit_and_available(os.getpid()) == (400, 100)
    (pod / "memory.max").write_text("max\n")
    (pod / "server" / "memory.max").write_text("max\n")
    assert memory.find_cgroup_limit_and_available(os.getpid()) is None


HIDDEN = """
import os
from vllmops.collect.machine.processes import Process, is_alive, read_process_table
from vllmops.model.roles import Role
table = read_process_table()
print(os.getpid() in table, 1 in table, is_alive(Process(Role.API, 1, 0)))
"""


@pytest.mark.root_only
@pytest.mark.parametrize("hidepid", ["1", "2"])
def test_processes_of_others_may_be_hidden(hidepid: str) -> None:
    """With 1 their pids are listed (systemd's ProtectProc=noaccess), with 2 not even those."""
    hide = f'mount -t proc -o hidepid={hidepid} proc /proc && exec "$@"'
    lower = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", hide, "sh", *lower, sys.executable, "-c", HIDDEN],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["True", "False", "False"], done.stderr
