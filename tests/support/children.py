"""Processes that load the agent as vLLM would, and run any code that they are sent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from vllmops.collect.machine.processes import Process
from vllmops.model import process_identity
from vllmops.model.agent_socket import get_socket_directory
from vllmops.model.roles import Role

CHILD: Final = Path(__file__).parents[1] / "agent" / "child.py"


@dataclass
class Child:
    """A process that runs the agent, and any code it is sent."""

    popen: subprocess.Popen[str]
    process: Process
    home: Path

    @property
    def socket(self) -> Path:
        return get_socket_directory(self.home) / f"{self.process.pid}.sock"

    @property
    def beat(self) -> Path:
        return self.socket.with_suffix(".beat")

    def send(self, code: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(repr(code) + "\n")
        self.popen.stdin.flush()

    def run(self, code: str) -> str:
        """Run code there; what it left in ``out``."""
        self.send(code)
        assert self.popen.stdout is not None
        answer: str = eval(self.popen.stdout.readline())
        assert not answer.startswith("Traceback"), answer
        return answer

    def end(self) -> str:
        """End it in order; what it logged."""
        return self.popen.communicate(timeout=60)[1]

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(60)
        for pipe in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            if pipe is not None:
                pipe.close()


Spawn: TypeAlias = Callable[..., Child]


# Python below a program that starts it, with a title in place of its name.
TITLED = ("bash", "-c", 'exec -a "$0" "$@"')


def start_child(
    title: str, role: Role, home: Path, inside: Sequence[str] = (), **env: str
) -> Child:
    """Start one.

    Args:
        title: what the process table shows.
        role: what the tests call it.
        home: its ``VLLMOPS_HOME``.
        inside: the program that starts it, for example in a namespace.
        env: what is added to the environment.
    """
    words = [*inside, *TITLED, title, sys.executable, str(CHILD)]
    popen = subprocess.Popen(
        words if inside else [title, str(CHILD)],
        executable=None if inside else sys.executable,
        # A title in place of the program's name hides its library from the interpreter.
        env={
            **os.environ,
            "PYTHONHOME": sys.base_prefix,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "VLLMOPS_HOME": str(home),
            **env,
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert popen.stdout is not None
    assert popen.stdout.readline() == "'up'\n"
    return Child(
        popen, Process(role, popen.pid, process_identity.read_identity(popen.pid).start_ticks), home
    )
