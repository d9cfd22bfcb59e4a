"""What tests of servers with many ranks share: code that runs in one rank, and who is who."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllmops.model.agent_socket import get_socket_directory

from ..support.waiting import until
from .conftest import Cli, Live, PlugIn
from .test_cache import send_image_request

ROLES = ("launcher", "api", "engine", "worker", "coordinator")
FOLDER = "RANKS_FOLDER"
# Runs what a test puts into a file that is named after a process.
RUN = f"""
import os
import threading
import time

def run(place):
    while True:
        if os.path.exists(place):
            with open(place) as file:
                exec(file.read(), {{}})
            os.remove(place)
        time.sleep(0.05)

def start():
    place = os.path.join(os.environ["{FOLDER}"], f"{{os.getpid()}}.py")
    if not any(thread.name == place for thread in threading.enumerate()):
        threading.Thread(target=run, args=(place,), daemon=True, name=place).start()

def register():
    start()
    os.register_at_fork(after_in_child=start)
"""
# As long as the file exists, the rank sleeps in a method of a class.
SLEEP = """
import os, time
from {module} import {owner} as owner

method = owner.{method}

def {method}(self, *args, **options):
    while os.path.exists({file!r}):
        time.sleep(0.05)
    return method(self, *args, **options)

owner.{method} = {method}
"""
# Before it reduces with the others of its group; and as it runs the model.
REDUCE = ("vllm.distributed.device_communicators.cpu_communicator", "CpuCommunicator", "all_reduce")
FORWARD = ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_model_forward")
GHOST = """
from vllmops.agent.hooks import vllm_objects as objects

objects.list_objects("mm-cache")[0]._cache._LRUCache__order["ghost"] = None
"""
NOBIND = ("--env", "VLLM_CPU_OMP_THREADS_BIND=nobind")


@dataclass(frozen=True)
class Ranks:
    """The processes of a server, by what `ps` shows, such as ``worker DP1 TP0``."""

    server: Live
    folder: Path

    def rows(self) -> list[dict[str, Any]]:
        return [row for row in self.server.row["processes"] if row["role"] in ROLES]

    def list_pids_by_name(self) -> dict[str, int]:
        """The pid of each process by its role and ranks; all have different ones."""
        rows = self.rows()
        found = {f"{row['role']} {row['ranks']}".rstrip(): row["pid"] for row in rows}
        assert len(found) == len(rows), rows
        return found

    def run(self, name: str, code: str) -> None:
        """Run code in a process."""
        place = self.folder / f"{self.list_pids_by_name()[name]}.py"
        place.with_suffix(".new").write_text(code)
        place.with_suffix(".new").rename(place)
        until(lambda: not place.exists())

    @contextmanager
    def stuck(
        self,
        name: str,
        place: tuple[str, str, str] = REDUCE,
        *,
        engine: str = "engine",
        requests: int = 1,
        model: str = "",
    ) -> Iterator[None]:
        """A worker that sleeps while others wait for it, with a request in its engine.

        Args:
            name: of the worker.
            place: module, class and method.
            engine: that has a request then.
            requests: how many are sent, so that each engine has one.
            model: that is asked, in place of the one that takes images.
        """
        file = self.folder / "asleep"
        file.touch()
        module, owner, method = place
        code = SLEEP.format(module=module, owner=owner, method=method, file=str(file))
        self.run(name, code)
        beat = get_socket_directory(self.server.home) / f"{self.list_pids_by_name()[engine]}.beat"
        url, complete = self.server.url, self.server.complete
        with ThreadPoolExecutor(requests) as pool:
            sent = [
                pool.submit(complete, model=model)
                if model
                else pool.submit(send_image_request, url, 77)
                for _ in range(requests)
            ]
            try:
                until(lambda: json.loads(beat.read_bytes())["running"])
                yield
            finally:
                file.unlink()
            assert {answer.result().status_code for answer in sent} == {200}


def make_plug_in_options(cli: Cli, plug_in: PlugIn, folder: Path) -> tuple[str, ...]:
    """Options for a server in whose processes tests run code."""
    path = os.pathsep.join((str(plug_in("ranks", RUN)), cli.environment["PYTHONPATH"]))
    return ("--env", f"PYTHONPATH={path}", "--env", f"{FOLDER}={folder}")


def encoder_rows(server: Live, *target: str) -> list[tuple[str, str, int]]:
    """Side, ranks and entries of each encoder cache, in the order of the output."""
    ran = server.cli("cache", "inspect", *(target or ("-t", server.name)), "--json")
    assert ran.code == 0, ran.out
    assert ran.data["findings"] == []
    return [
        (row["side"], row["ranks"], row["entries"])
        for row in ran.data["caches"]
        if row["kind"] == "encoder"
    ]
