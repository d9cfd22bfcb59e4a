"""Which servers there are and which one a person means: over process tables and records.

The tables are written here: nobody can order a pid to be reused. The commands' tests, and
tests/live, do it with processes.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllmops.collect.machine import processes
from vllmops.collect.machine.processes import Process, ProcessEntry, Table
from vllmops.collect.machine.server_address import find_option
from vllmops.model.roles import Role
from vllmops.servers import discovery
from vllmops.servers.discovery import Server, is_local, list_servers, resolve_server
from vllmops.servers.record import Failure, InstanceFolder, InstanceRecord, InstanceState
from vllmops.support.errors import ExitCode, VllmopsError

FIRST = 2**22 + 10  # above every real pid
Put = Callable[..., InstanceRecord]


@pytest.fixture
def table(home: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    """The process table that discovery sees; empty at first."""
    found: Table = {}
    monkeypatch.setattr(processes, "read_process_table", lambda: found)
    return found


def start(table: Table, first: int, *words: str, ppid: int = 1) -> int:
    """A server's three processes from that pid on."""
    for offset, line in enumerate([" ".join(words), "VLLM::EngineCore", "VLLM::Worker"]):
        pid = FIRST + first + offset
        parent = ppid if offset == 0 else pid - 1
        table[pid] = ProcessEntry(pid, parent, 1000 + pid, tuple(line.split()), 2**20, zombie=False)
    return FIRST + first


def serve(table: Table, first: int, words: str = "") -> int:
    return start(table, first, "/x/bin/python", "/x/bin/vllm", "serve", "M", words)


@pytest.fixture
def put(table: Table) -> Iterator[Put]:
    """Writes an instance's record; its lock is held, as by a supervisor, unless it is over."""
    held = []

    def write(
        name: str,
        pid: int | None = None,
        state: InstanceState = InstanceState.READY,
        failure: Failure | None = None,
        port: int = 8000,
        host: str = "127.0.0.1",
    ) -> InstanceRecord:
        tree = processes.build_process_tree(table, [pid] if pid else [])
        record = InstanceRecord(
            name=name,
            model="M",
            command=("x",),
            environment={},
            directory="/",
            host=host,
            port=port,
            detached=True,
            created_at=0.0,
            state=state,
            processes=tree,
            failure=failure,
        )
        folder = InstanceFolder(name)
        folder.path.mkdir(parents=True)
        folder.save_record(record)
        if not state.is_over:
            held.append(folder.take_lock())
        return record

    yield write
    for lock in held:
        if lock is not None:
            os.close(lock)


def refusal(
    code: str, exit_code: ExitCode, target: str | None, strangers: bool = True
) -> VllmopsError:
    with pytest.raises(VllmopsError) as caught:
        resolve_server(target, allow_foreign=strangers)
    assert (caught.value.code, caught.value.exit_code) == (code, exit_code)
    assert caught.value.hint
    return caught.value


def test_no_server(table: Table) -> None:
    assert list_servers() == []
    refusal("target.none", ExitCode.NOT_FOUND, None)
    refusal("target.unknown", ExitCode.NOT_FOUND, "a")


def test_an_instance_by_each_of_its_names(table: Table, put: Put) -> None:
    pid = serve(table, 0)
    put("a", pid, port=8123)
    targets = [None, "a", str(pid), str(pid + 1), str(pid + 2)]
    targets += ["http://localhost:8123", "http://127.0.0.1:8123/v1", "http://[::1]:8123"]
    for target in targets:
        found = resolve_server(target)
        assert found.name == "a"
        assert [p.role for p in found.processes] == [Role.API, Role.ENGINE, Role.WORKER]
        assert found.supervised is True
    for target in ["b", str(pid + 3), "http://127.0.0.1:8124"]:
        error = refusal("target.unknown", ExitCode.NOT_FOUND, target)
        assert target in error.message
        assert "running: a" in error.message
    error = refusal("target.remote", ExitCode.USAGE, "http://10.1.2.3:8123")
    assert "http://10.1.2.3:8123 is on another machine" in error.message


@pytest.mark.parametrize(
    ("asked", "listening", "same"),
    [
        ("localhost", "0.0.0.0", True),
        ("127.0.0.1", "::", True),
        ("localhost", "", True),
        ("::1", "::1", True),
        ("0.0.0.0", "0.0.0.0", True),
        ("localhost", "10.1.2.3", False),
        ("10.1.2.3", "10.1.2.3", True),
        ("10.1.2.3", "127.0.0.1", False),
        ("elsewhere.example", "0.0.0.0", False),
    ],
)
def test_whether_a_url_is_a_server_here(asked: str, listening: str, same: bool) -> None:
    assert is_local(asked, listening) is same


def test_target_is_required_if_two_servers_run(
    table: Table, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("a", serve(table, 0))
    put("b", serve(table, 10), port=8001)
    error = refusal("target.ambiguous", ExitCode.USAGE, None)
    assert "a, b" in error.message
    assert resolve_server("b").name == "b"
    monkeypatch.setenv("VLLMOPS_TARGET", "b")
    assert resolve_server(None).name == "b"
    assert resolve_server("a").name == "a"
    monkeypatch.setenv("VLLMOPS_TARGET", "gone")
    error = refusal("target.unknown", ExitCode.NOT_FOUND, None)
    assert "'gone' of VLLMOPS_TARGET" in error.message
    monkeypatch.setenv("VLLMOPS_TARGET", "")
    refusal("target.ambiguous", ExitCode.USAGE, None)


def test_a_stranger_does_not_stand_in_the_way_of_an_instance(table: Table, put: Put) -> None:
    stranger = serve(table, 0, "--port 9000")
    assert resolve_server(None).pid == stranger
    refusal("target.ambiguous", ExitCode.USAGE, None, strangers=False)
    put("a", serve(table, 10))
    assert resolve_server(None).name == "a"
    assert resolve_server(None, allow_foreign=False).name == "a"
    assert resolve_server(str(stranger + 2), allow_foreign=False).pid == stranger
    assert resolve_server("http://localhost:9000").pid == stranger


def test_two_strangers_must_be_named(table: Table) -> None:
    first, second = serve(table, 0), serve(table, 10)
    error = refusal("target.ambiguous", ExitCode.USAGE, None)
    assert f"{first}, {second}" in error.message


def test_a_failed_instance_tells_why(table: Table, put: Put) -> None:
    put("a", state=InstanceState.FAILED, failure=Failure("OutOfMemoryError: no room"))
    put("b", state=InstanceState.STOPPED)
    assert "no room" in refusal("target.over", ExitCode.NOT_FOUND, "a").message
    error = refusal("target.over", ExitCode.NOT_FOUND, "b")
    assert "stopped" in error.message
    assert "vllmops restart b" in error.hint
    refusal("target.none", ExitCode.NOT_FOUND, None)


def test_starting_instance_is_resolved_without_processes(table: Table, put: Put) -> None:
    put("a", state=InstanceState.STARTING)
    assert resolve_server(None).name == "a"
    assert resolve_server(None).processes == ()


def test_a_reused_pid_is_not_the_instance(table: Table, put: Put) -> None:
    pid = serve(table, 0)
    put("a", pid)
    for number in range(3):
        seen = table[pid + number]
        table[pid + number] = ProcessEntry(
            seen.pid, 1, seen.start_ticks + 60, ("nginx",), 1, zombie=False
        )
    (found,) = list_servers()
    assert found.processes == ()
    refusal("target.unknown", ExitCode.NOT_FOUND, str(pid))


def test_a_reused_pid_that_is_another_server_is_a_stranger(table: Table, put: Put) -> None:
    pid = serve(table, 0)
    put("a", pid)
    for number in range(3):
        seen = table[pid + number]
        table[pid + number] = ProcessEntry(
            seen.pid, seen.ppid, seen.start_ticks + 60, seen.arguments, 1, zombie=False
        )
    ours, stranger = list_servers()
    assert (ours.name, ours.processes) == ("a", ())
    assert (stranger.name, stranger.pid) == (None, pid)
    assert resolve_server(str(pid)).name is None


def test_remaining_processes_still_belong_to_their_instance(table: Table, put: Put) -> None:
    pid = serve(table, 0)
    put("a", pid)
    del table[pid]
    table[pid + 1] = ProcessEntry(
        pid + 1, 1, 1000 + pid + 1, ("VLLM::EngineCore",), 1, zombie=False
    )
    (found,) = list_servers()
    assert [p.role for p in found.processes] == [Role.ENGINE, Role.WORKER]


def test_orphans_of_a_stranger(table: Table) -> None:
    pid = serve(table, 0)
    del table[pid]
    (found,) = list_servers()
    assert [p.role for p in found.processes] == [Role.ENGINE, Role.WORKER]
    assert (found.url, found.model) == (None, None)
    assert resolve_server(str(pid + 2)).pid == pid + 1


def test_a_server_below_a_shell_is_one_server(table: Table) -> None:
    shell = FIRST
    table[shell] = ProcessEntry(shell, 1, 1, ("bash", "-c", "vllm serve M"), 1, zombie=False)
    pid = start(table, 1, "/x/bin/python /x/bin/vllm serve M", ppid=shell)
    (found,) = list_servers()
    assert found.pid == pid


def test_a_worker_below_a_process_that_is_not_vllms(table: Table) -> None:
    pid = serve(table, 0)
    table[pid + 5] = ProcessEntry(pid + 5, pid, 5, ("ray-worker",), 1, zombie=False)
    table[pid + 6] = ProcessEntry(pid + 6, pid + 5, 6, ("VLLM::Worker_TP1",), 1, zombie=False)
    (found,) = list_servers()
    assert len(found.processes) == 5


def test_zombies_are_no_servers(table: Table) -> None:
    words = ("/x/bin/vllm", "serve", "M")
    table[FIRST] = ProcessEntry(FIRST, 1, 1, words, None, zombie=True)
    assert list_servers() == []


@pytest.mark.parametrize(
    ("words", "url", "model"),
    [
        ("--port 9000", "http://127.0.0.1:9000", "M"),
        ("--port=9000 --host 0.0.0.0", "http://127.0.0.1:9000", "M"),
        ("--port 1 --port 9000", "http://127.0.0.1:9000", "M"),
        ("", "http://127.0.0.1:8000", "M"),
        ("--port x", "http://127.0.0.1:8000", "M"),
        ("--port " + "9" * 5000, "http://127.0.0.1:8000", "M"),
        ("--port \N{SUPERSCRIPT TWO}", "http://127.0.0.1:8000", "M"),
        ("--host box.example", "http://box.example:8000", "M"),
        ("--host ::1", "http://[::1]:8000", "M"),
        ("--ssl_certfile c.pem", "https://127.0.0.1:8000", "M"),
        ("--model N", "http://127.0.0.1:8000", "N"),
    ],
)
def test_a_stranger_is_told_by_its_command_line(
    table: Table, words: str, url: str, model: str
) -> None:
    serve(table, 0, words)
    (found,) = list_servers()
    assert (found.url, found.model, found.record, found.supervised) == (url, model, None, None)


def test_a_server_of_an_old_kind(table: Table) -> None:
    start(table, 0, "python -m vllm.entrypoints.openai.api_server --model /m/a --port 81")
    (found,) = list_servers()
    assert (found.model, found.port) == ("/m/a", 81)


def test_a_damaged_record_leaves_the_others(table: Table, put: Put) -> None:
    put("a", serve(table, 0))
    put("b", serve(table, 10), port=8001)
    InstanceFolder("a").record_file.write_text("{")
    assert {server.name for server in list_servers()} == {"b", None}
    assert resolve_server(None).name == "b"


def test_a_name_wins_over_a_pid(table: Table, put: Put) -> None:
    pid = serve(table, 0)
    put("a", pid)
    put(str(pid), serve(table, 10), port=8001)
    assert resolve_server(str(pid)).name == str(pid)


def test_an_instance_is_known_from_a_process_whose_parent_is_gone(table: Table, put: Put) -> None:
    pid = serve(table, 0)
    helper = pid + 7
    table[helper] = ProcessEntry(helper, pid + 2, 7, ("helper",), 1, zombie=False)
    put("a", pid)
    with contextlib.suppress(KeyError):
        del table[pid + 2]
    table[helper] = ProcessEntry(helper, 1, 7, ("helper",), 1, zombie=False)
    (found,) = list_servers()
    assert helper in {p.pid for p in found.processes}


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--port", "1"], "1"),
        (["--port=1"], "1"),
        (["--port"], None),
        (["--port=1", "--port", "2"], "2"),
        (["--support", "1"], None),
        (["port", "1"], None),
        ([], None),
    ],
)
def test_options_of_a_command_line(arguments: list[str], value: str | None) -> None:
    assert find_option(arguments, "--port") == value


def test_labels() -> None:
    tree = (Process(Role.API, 5, 1),)
    assert Server("a", tree).label == "a"
    assert Server(None, tree).label == "5"
    assert discovery.format_choices([]) == "no server runs on this machine"
