"""A server in a container, seen from outside and from a debug container: real namespaces."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from .support.children import CHILD
from .support.extent import programs
from .support.forks import FORKS, Answered

pytestmark = programs

# Another root, which has a folder of its own; the way to it leads over an absolute link.
START = """
set -e
mount --make-rprivate /
mount --rbind / "$1"
mount -t tmpfs none "$1/mnt"
mount -t proc none "$1/proc"
mkdir "$1/mnt/data" "$1/mnt/old"
ln -s /mnt/data "$1/mnt/link"
cd "$1"
pivot_root . mnt/old
umount -l /mnt/old
exec bash -c 'exec -a VLLM::EngineCore_DP3 "$@"' sh "$2" "$3"
"""
# As `kubectl debug --target` gives it: the target's processes, and files of its own.
DEBUG = ["unshare", "--mount", "sh", "-c", 'mount -t proc none /proc && exec "$@"', "sh"]
WITHOUT_RIGHT = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]


@dataclass
class Container:
    """A process with the agent, in namespaces of its own.

    Args:
        pid: seen from outside.
        inner: seen from inside.
    """

    pid: int
    inner: int

    def run_commands(
        self, outside: bool, *lines: tuple[str, ...], right: bool = True
    ) -> list[tuple[int, Any]]:
        """Run commands on it from outside, or beside it; the exit code and answer of each."""
        pid = self.pid if outside else self.inner
        debug = [] if outside else ["nsenter", "--pid", f"--target={self.pid}", *DEBUG]
        lower = [] if right else WITHOUT_RIGHT
        done = subprocess.run(
            [
                *(*debug, *lower, sys.executable, str(FORKS)),
                json.dumps([[*words, "-t", str(pid), "--json"] for words in lines]),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answers: list[Answered] = json.loads(done.stdout)
        for answer in answers:
            assert "Traceback" not in answer["err"], answer["err"]
        return [(answer["code"], json.loads(answer["out"])) for answer in answers]


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    root = tmp_path_factory.mktemp("root")
    python = os.path.realpath(sys.executable)
    how = ["unshare", "--mount", "--pid", "--fork", "--ipc", "--uts", "--kill-child"]
    popen = subprocess.Popen(
        [*how, "sh", "-c", START, "sh", str(root), python, str(CHILD)],
        env={
            **os.environ,
            "PYTHONHOME": sys.base_prefix,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "VLLMOPS_HOME": "/mnt/link/state",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert popen.stdout
    assert popen.stdout.readline() == "'up'\n"
    (child,) = psutil.Process(popen.pid).children()
    yield Container(child.pid, 1)
    child.send_signal(signal.SIGKILL)
    popen.communicate(timeout=60)


@pytest.mark.parametrize("outside", [True, False], ids=["node", "debug container"])
def test_every_command_that_reads_works(
    container: Container, outside: bool, home: Path, tmp_path: Path
) -> None:
    pid = container.pid if outside else container.inner
    file = str(tmp_path / "bundle.tar.gz")
    lines = [
        *(("status",), ("cache", "inspect"), ("patches", "list")),
        *(("memory", "record", "--duration", "2"), ("stacks", "dump"), ("bundle", "-o", file)),
    ]
    answers = container.run_commands(outside, *lines)
    (_, status), (code, caches), *answers = answers
    (process,) = status["data"]["instance"]["processes"]
    assert (process["pid"], process["role"], process["dp_rank"]) == (pid, "engine", 3)
    assert process["agent"] == "answers"
    assert (code, caches["data"]["silent"]) == (0, []), caches
    (code, patches), (recorded_code, recorded), (dump_code, stacks), (bundle_code, bundle) = answers
    assert (code, patches["errors"]) == (0, [])
    assert (recorded_code, recorded["errors"]) == (0, []), recorded["errors"]
    (dumped,) = stacks["data"]["processes"]
    assert (dump_code, dumped["pid"]) == (0, pid)
    assert any(frame["file"].endswith("child.py") for frame in dumped["threads"][0]["frames"])
    assert bundle_code == 0
    assert {part["name"] for part in bundle["data"]["missing"]} == {
        "metrics.txt",  # it serves no HTTP
        "collect_env.txt",
    }


@pytest.mark.parametrize("outside", [True, False], ids=["node", "debug container"])
def test_without_the_right_to_look_the_error_says_what_the_pod_needs(
    container: Container, outside: bool, home: Path
) -> None:
    lines = (("cache", "inspect"), ("stacks", "dump"))
    (code, caches), (_, stacks) = container.run_commands(outside, *lines, right=False)
    assert code == 4
    assert "SYS_PTRACE" in caches["errors"][0]["hint"]
    assert "SYS_PTRACE" in json.dumps(stacks)
