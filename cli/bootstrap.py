"""Sets up ``.venv`` with vLLM for the CPU, and runs the main job or all tests in it.

    python3 cli/bootstrap.py demo         start a server with a demo model, and show its caches
    python3 cli/bootstrap.py test         run the formatter, the linters, the type checker,
                                          the fast tests, the live tests and short benchmarks
    python3 cli/bootstrap.py test --fast  only the checks of the code, and the tests that start
                                          no program: a minute and a half
    python3 cli/bootstrap.py test --all   all of it with whole test matrices, longer soaks and
                                          whole benchmarks; --soak MINUTES for the longest one

It imports the standard library alone, because it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "installed"
OURS = VENV / "made-by-bootstrap"
PACKAGE = ".[cpu,audio,dev]"
SATURATED = "tests/live/test_probe.py::test_a_saturated_server_lives"
# The package index has only CUDA builds of these. With a torch for the CPU, each of them stops vLLM
# (`operator torchvision::nms does not exist`). The demo models do not need them.
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")


def run(*words: str) -> None:
    """Run a command in the environment; if it fails, exit with its exit code."""
    if code := attempt(*words):
        sys.exit(code)


def attempt(*words: str) -> int:
    """Run a command in the environment; returns its exit code."""
    print(f"$ {shlex.join(words)}", flush=True)
    return subprocess.run(words, cwd=ROOT, env=environment(), check=False).returncode


def environment() -> dict[str, str]:
    """The environment of commands."""
    # Tests start the program many times: without cached bytecode each start compiles all modules.
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PATH": f"{VENV / 'bin'}{os.pathsep}{kept.get('PATH', '')}"}


@contextmanager
def beside(*words: str) -> Iterator[None]:
    """Run a command during the block; if it fails, print at the end what it said, and exit."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=said, stderr=said)
        try:
            yield
        except BaseException:
            process.send_signal(signal.SIGINT)  # on which pytest ends what it has started
            raise
        finally:
            code = process.wait()
            said.seek(0)
            shown = f"failed:\n{said.read().decode()}" if code else "passed"
            print(f"$ {shlex.join(words)}\n{shown}", flush=True)
    if code:
        sys.exit(code)


def install() -> None:
    """Bring ``.venv`` up to date with ``pyproject.toml``; do nothing if it is."""
    content = (ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()
    stamp = f"{sys.version} {hashlib.sha256(content).hexdigest()}"
    if STAMP.is_file() and STAMP.read_text() == stamp:
        return
    foreign = VENV.exists() and any(VENV.iterdir()) and not (OURS.exists() or STAMP.exists())
    if VENV.is_symlink() or foreign:
        sys.exit(f"{VENV} was not made by this script, which would empty it: move it away first")
    print(f"setting up {VENV}: takes about 2 minutes and 2 GB", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir(exist_ok=True)
    OURS.touch()
    try:
        venv.create(VENV, with_pip=True)
    except subprocess.CalledProcessError:
        sys.exit(
            "This Python cannot create a virtual environment with pip. "
            "On Debian and Ubuntu: apt install python3-venv"
        )
    pip = (str(VENV / "bin/python"), "-m", "pip", "--disable-pip-version-check")
    # pip would compile bytecode on one core; below, all cores do it.
    plain = (*pip, "install", "--quiet", "--quiet", "--no-compile", "--editable", PACKAGE)
    print(f"$ {shlex.join(plain)}", flush=True)
    if subprocess.run(plain, cwd=ROOT, check=False).returncode:
        # uv knows PyTorch's CPU index; pip does not.
        print("pip found no torch for the CPU; uv installs it from PyTorch's index", flush=True)
        run(*pip, "install", "--quiet", "uv")
        uv = (str(VENV / "bin/uv"), "pip", "install", "--python", str(VENV / "bin/python"))
        run(*uv, "--torch-backend", "cpu", "--editable", PACKAGE)
    run(*pip, "uninstall", "--quiet", "--quiet", "--yes", *CUDA_ONLY)
    # Some packages contain files for another Python version. Those fail to compile; ignore that.
    attempt(str(VENV / "bin/python"), "-m", "compileall", "-qq", "-j", "0", str(VENV / "lib"))
    STAMP.write_text(stamp)


def demo() -> None:
    """Serve the vision demo model, send three images, one of them twice, and show the caches."""
    python, vllmops = str(VENV / "bin/python"), str(VENV / "bin/vllmops")
    url = demo_url(vllmops)
    if url is None:
        run(vllmops, "serve", "--demo", "vision", "--detach", "--name", "demo")
        url = demo_url(vllmops)
    print(f"sending images to {url}", flush=True)
    for image in ("1", "2", "3", "1"):
        words = (python, "-m", "vllmops.demo.inputs", image)
        body = subprocess.run(words, check=True, capture_output=True).stdout
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
        urllib.request.urlopen(request, timeout=120).read()
    run(vllmops, "cache", "inspect", "--target", "demo")
    print(f"The server keeps running at {url}. To stop it: {vllmops} stop demo")


def demo_url(vllmops: str) -> str | None:
    """The demo server's URL; None if it is not ready."""
    listed = subprocess.run([vllmops, "ps", "--json"], check=True, capture_output=True).stdout
    for instance in json.loads(listed)["data"]["instances"]:
        if instance["name"] == "demo" and instance["state"] == "ready":
            return str(instance["url"])
    return None


def test(*, fast: bool, everything: bool) -> None:
    """Run all that CI checks.

    Args:
        fast: only checks of the code, and tests that start no program.
        everything: leave nothing out of matrices, soaks, benchmarks.
    """
    if everything:
        os.environ["VLLMOPS_TEST_ALL"] = "1"
    # Compiles the tests, as else every worker would do, on the core that the linters leave idle.
    with beside("pytest", "--collect-only", "-qqq"):
        run("ruff", "format", "--check", ".")
        run("ruff", "check", ".")
        run("lint-imports")
    # Tests wait half of their time, for processes above all; others, and mypy, use the cores then.
    with beside("mypy"):
        chosen = ("-m", "not programs") if fast else ()
        pytest("6", "worksteal", "--ignore", "tests/live", *chosen)
    if fast:
        return
    # The others are the load on the machine of one that takes minutes and little else. Those of a
    # file share servers, each of which takes 1 GB and, at work, one core. tests/live/conftest.py
    # puts them in order.
    with beside("pytest", SATURATED):
        live = ("--no-loadscope-reorder", "tests/live", "--deselect", SATURATED)
        pytest("3", "loadgroup", *live)
    run("python", "tests/bench/run.py", *([] if everything else ["--short"]))


def pytest(workers: str, way: str, *which: str) -> None:
    """Run tests in so many processes."""
    run("pytest", "--numprocesses", workers, "--dist", way, *which)


def main() -> None:
    parser = argparse.ArgumentParser(description="Set up vllmops, and run it or its tests.")
    jobs = parser.add_subparsers(dest="job", required=True)
    jobs.add_parser("demo", help="start a server with a demo model, and show its caches")
    tests = jobs.add_parser("test", help="run all checks, tests and short benchmarks")
    extent = tests.add_mutually_exclusive_group()
    extent.add_argument(
        "--fast",
        action="store_true",
        help="only checks of the code and tests that start no program (90 seconds)",
    )
    extent.add_argument(
        "--all",
        action="store_true",
        help="run whole test matrices, longer soaks and whole benchmarks (hours)",
    )
    tests.add_argument("--soak", help="minutes of the soak that heals, at most (240)")
    given = parser.parse_args()
    if sys.version_info < (3, 11):
        sys.exit(f"vllmops needs Python 3.11 or newer; this is Python {sys.version.split()[0]}")
    install()
    if given.job == "demo":
        demo()
    else:
        if given.soak:
            os.environ["VLLMOPS_SOAK_MINUTES"] = given.soak
        test(fast=given.fast, everything=given.all)


if __name__ == "__main__":
    main()
