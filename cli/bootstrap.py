"""Sets up ``.venv`` with vLLM for the CPU, and runs the main job or tests in it.

    python3 cli/bootstrap.py demo         start a server with a demo model, and show its caches
    python3 cli/bootstrap.py test         the gate, which CI runs: the formatter, the linters, the
                                          type checker, the tests that start no vLLM, and one story
                                          on a real vLLM: six minutes
    python3 cli/bootstrap.py test --live  all tests that the gate leaves out: on a real vLLM, with
                                          its old versions, and short benchmarks: 20 minutes
    python3 cli/bootstrap.py test --fast  only the checks of the code, and the tests that start no
                                          program: a minute and a half
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
import time
import urllib.request
import venv
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "installed"
OURS = VENV / "made-by-bootstrap"
# The extras of the package that a job needs, beyond those of the jobs above it.
EXTRAS = {"demo": ("cpu", "audio", "top"), "test": ("dev",), "live": ("live",)}
SATURATED = "tests/live/test_probe.py::test_a_saturated_server_lives"
STORY = "tests/live/test_story.py"
EXTENTS = {
    "fast": "only the checks, and the tests that start no program (90 seconds)",
    "live": "all that the gate leaves out: tests on a real vLLM, short benchmarks (20 minutes)",
    "all": "all of it, with whole matrices, longer soaks and whole benchmarks (hours)",
}
GATE_S = 45 * 60
FAILURES = "VLLMOPS_TEST_FAILURES"  # names a file to which the tests write which of them failed
RUNNING: list[subprocess.Popen[bytes]] = []
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
    return start(*words).wait()


def start(*words: str, output: IO[bytes] | int | None = None) -> subprocess.Popen[bytes]:
    """Start a command in the environment."""
    process = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=output, stderr=output)
    RUNNING.append(process)
    return process


def environment() -> dict[str, str]:
    """The environment of commands."""
    # Tests start the program many times: without cached bytecode each start compiles all modules.
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PATH": f"{VENV / 'bin'}{os.pathsep}{kept.get('PATH', '')}"}


def together(*commands: Sequence[str]) -> list[str]:
    """Run commands side by side; what the first says is shown, of the others only what fails.

    Returns:
        Those that failed.
    """
    with ExitStack() as stack:
        others = []
        for words in commands[1:]:
            output = stack.enter_context(tempfile.TemporaryFile())
            others.append((words, start(*words, output=output), output))
        failed = [shlex.join(commands[0])] if attempt(*commands[0]) else []
        for words, process, output in others:
            code = process.wait()
            output.seek(0)
            shown = f"failed:\n{output.read().decode()}" if code else "passed"
            print(f"$ {shlex.join(words)}\n{shown}", flush=True)
            failed += [shlex.join(words)] if code else []
    return failed


def limit(seconds: int) -> None:
    """End all that runs, and this program, after some time: the tests say which of them ran."""

    def end(*_: object) -> None:
        print(f"not at an end after {seconds // 60} minutes: it is ended", flush=True)
        end_running()
        show_failures([])
        os._exit(1)

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)


def end_running() -> None:
    """End the commands that run, within a minute."""
    running = [process for process in RUNNING if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGINT)  # on which pytest ends what it has started
    deadline = time.monotonic() + 60
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0))
        process.kill()


def show_failures(failed: list[str]) -> None:
    """Print, as the last lines, which commands and tests failed, and how to run one alone."""
    path = Path(os.environ[FAILURES])
    tests = path.read_text().splitlines() if path.exists() else []
    print("\nFailed:", *failed, *tests, sep="\n", flush=True)
    if tests:
        name = tests[0].split(" ", 1)[1].partition(" - ")[0]
        print(f"To run one alone: .venv/bin/pytest {shlex.quote(name)}", flush=True)


def install(job: str) -> None:
    """Bring ``.venv`` up to date with ``pyproject.toml``; do nothing if it is.

    Args:
        job: what it is for, a key of `EXTRAS`.
    """
    content = (ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()
    state = f"{sys.version} {hashlib.sha256(content).hexdigest()}"
    jobs = list(EXTRAS)
    wanted = jobs[: jobs.index(job) + 1]
    installed = STAMP.read_text() if STAMP.is_file() else ""
    there = next((name for name in jobs if installed == f"{state} {name}"), None)
    missing = jobs[jobs.index(there) + 1 : len(wanted)] if there else wanted
    if not missing:
        return
    if not there:
        make_environment()
    install_package([extra for name in missing for extra in EXTRAS[name]])
    STAMP.write_text(f"{state} {job}")


def make_environment() -> None:
    """Make an empty ``.venv`` in place of an older one of this script."""
    foreign = VENV.exists() and any(VENV.iterdir()) and not (OURS.exists() or STAMP.exists())
    if VENV.is_symlink() or foreign:
        sys.exit(f"{VENV} was not made by this script, which would empty it: move it away first")
    print(f"setting up {VENV}", flush=True)
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


def install_package(extras: Sequence[str]) -> None:
    """Install this project with some of its extras."""
    package = f".[{','.join(extras)}]"
    print("installing packages: takes about 2 minutes", flush=True)
    pip = (str(VENV / "bin/python"), "-m", "pip", "--disable-pip-version-check")
    # pip would compile bytecode on one core; below, all cores do it.
    plain = (*pip, "install", "--quiet", "--quiet", "--no-compile", "--editable", package)
    if attempt(*plain):
        # uv knows PyTorch's CPU index; pip does not.
        print("pip found no torch for the CPU; uv installs it from PyTorch's index", flush=True)
        run(*pip, "install", "--quiet", "uv")
        uv = (str(VENV / "bin/uv"), "pip", "install", "--python", str(VENV / "bin/python"))
        run(*uv, "--torch-backend", "cpu", "--editable", package)
    run(*pip, "uninstall", "--quiet", "--quiet", "--yes", *CUDA_ONLY)
    # Some packages contain files for another Python version. Those fail to compile; ignore that.
    attempt(str(VENV / "bin/python"), "-m", "compileall", "-qq", "-j", "0", str(VENV / "lib"))


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


def test(extent: str) -> list[str]:
    """Run checks, tests and benchmarks.

    Args:
        extent: a key of `EXTENTS`, or empty for the gate.

    Returns:
        The commands that failed.
    """
    if extent == "all":
        unlimited = "--timeout 0 -o faulthandler_timeout=0"  # soaks take hours
        os.environ |= {"VLLMOPS_TEST_ALL": "1", "PYTEST_ADDOPTS": unlimited}
    elif extent != "live":
        os.environ["PYTHONHASHSEED"] = "0"
    if extent == "live":
        return [*together(fast_tests("-m", "live_only")), *test_live("--short")]
    # Compiles the tests, as else every worker would do, on the core that the linters leave idle.
    collect = start("pytest", "--collect-only", "-qqq", output=subprocess.DEVNULL)
    checks = (
        ("ruff", "format", "--check", "."),
        ("ruff", "check", "."),
        ("lint-imports", "--no-logo"),
    )
    failed = [shlex.join(words) for words in checks if attempt(*words)]
    collect.wait()
    if failed:
        return failed
    # Tests wait half of their time, for processes above all; others, and mypy, use the cores then.
    if extent == "fast":
        return together(fast_tests("-m", "not programs and not live_only"), ("mypy",))
    if extent == "all":
        return [*together(fast_tests(), ("mypy",)), *test_live()]
    return together(fast_tests("-m", "not live_only"), ("mypy",), ("pytest", "-q", STORY))


def test_live(*how: str) -> list[str]:
    """Run the tests on a real vLLM, then the benchmarks; returns the commands that failed.

    Args:
        how: options of the benchmarks.
    """
    # The others are the load on the machine of one that takes minutes and little else. Those of a
    # file share servers, each of which takes 1 GB and, at work, one core. tests/live/conftest.py
    # puts them in order.
    live = ("--no-loadscope-reorder", "tests/live", "--deselect", SATURATED)
    failed = together(spread("3", "loadgroup", *live), ("pytest", "-q", SATURATED))
    return [*failed, *together(("python", "tests/bench/run.py", *how))]


def fast_tests(*which: str) -> tuple[str, ...]:
    """The command that runs tests which need no server."""
    return spread("6", "worksteal", "--ignore", "tests/live", *which)


def spread(workers: str, way: str, *which: str) -> tuple[str, ...]:
    """The command that runs tests in so many processes."""
    return ("pytest", "-q", "--numprocesses", workers, "--dist", way, *which)


def main() -> None:
    parser = argparse.ArgumentParser(description="Set up vllmops, and run it or its tests.")
    jobs = parser.add_subparsers(dest="job", required=True)
    jobs.add_parser("demo", help="start a server with a demo model, and show its caches")
    tests = jobs.add_parser("test", help="run the gate: all checks, and most tests (6 minutes)")
    extent = tests.add_mutually_exclusive_group()
    for name, words in EXTENTS.items():
        extent.add_argument(
            f"--{name}", dest="extent", action="store_const", const=name, default="", help=words
        )
    tests.add_argument("--soak", help="minutes of the soak that heals, at most (240)")
    given = parser.parse_args()
    if sys.version_info < (3, 11):
        sys.exit(f"vllmops needs Python 3.11 or newer; this is Python {sys.version.split()[0]}")
    if given.job == "demo":
        install("demo")
        demo()
        return
    if given.soak:
        os.environ["VLLMOPS_SOAK_MINUTES"] = given.soak
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FAILURES] = f"{folder}/failed"
        if given.extent in {"live", "all"}:
            install("live")
        else:
            limit(GATE_S)
            install("test")
        if failed := test(given.extent):
            show_failures(failed)
            sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        end_running()
        sys.exit(130)
