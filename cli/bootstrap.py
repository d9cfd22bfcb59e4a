"""Sets up ``.venv`` with vLLM for the CPU, and runs the main job or all tests in it.

    python3 cli/bootstrap.py demo     a real server on a demo model, and a look into its caches
    python3 cli/bootstrap.py test     formatter, linter, types, fast tests, live tests, benchmarks

Standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "installed"
WANTED = ".[cpu,audio,dev]"
# The package index has CUDA builds of these alone, and each kills a vLLM whose torch is for the
# CPU (`operator torchvision::nms does not exist`). The demo models need none of them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def run(*words: str) -> None:
    """Run a command in the environment and stop with its exit code where it fails."""
    if code := attempt(*words):
        sys.exit(code)


def attempt(*words: str) -> int:
    """Run a command in the environment; returns its exit code."""
    print(f"$ {shlex.join(words)}", flush=True)
    # Bytecode of our own modules is written, as it is for a user.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PATH"] = f"{VENV / 'bin'}{os.pathsep}{environment.get('PATH', '')}"
    return subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode


def install() -> None:
    """Bring ``.venv`` up to date with ``pyproject.toml``; nothing to do the second time."""
    content = (ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()
    want = f"{sys.version} {hashlib.sha256(content).hexdigest()}"
    if STAMP.is_file() and STAMP.read_text() == want:
        return
    print(f"setting up {VENV}: some 2 minutes and 2 GB", flush=True)
    try:
        venv.create(VENV, with_pip=True, clear=True)
    except subprocess.CalledProcessError:
        sys.exit("no pip for a virtual environment; on Debian and Ubuntu: apt install python3-venv")
    pip = (str(VENV / "bin/python"), "-m", "pip", "--disable-pip-version-check")
    vllm_needs = "torch for the CPU"
    # pip compiles one file after the other, on one core.
    plain = (*pip, "install", "--quiet", "--quiet", "--no-compile", "--editable", WANTED)
    print(f"$ {shlex.join(plain)}", flush=True)
    if subprocess.run(plain, cwd=ROOT, check=False).returncode:
        # No wheel of it in pip's own reach: uv knows PyTorch's CPU index by itself.
        print(f"pip found no {vllm_needs}; uv takes it from PyTorch's CPU index", flush=True)
        run(*pip, "install", "--quiet", "uv")
        uv = (str(VENV / "bin/uv"), "pip", "install", "--python", str(VENV / "bin/python"))
        run(*uv, "--torch-backend", "cpu", "--editable", WANTED)
    run(*pip, "uninstall", "--quiet", "--quiet", "--yes", *UNWANTED)
    # Some packages have files that are for another Python; whoever imports one is told.
    attempt(str(VENV / "bin/python"), "-m", "compileall", "-qq", "-j", "0", str(VENV / "lib"))
    STAMP.write_text(want)


def demo() -> None:
    """Serve the vision demo model, send it three images, one of them twice, and look inside."""
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
    print(f"It goes on serving at {url}; {vllmops} stop demo ends it.")


def demo_url(vllmops: str) -> str | None:
    """Where the demo server is, None where none is ready."""
    listed = subprocess.run([vllmops, "ps", "--json"], check=True, capture_output=True).stdout
    for instance in json.loads(listed)["data"]["instances"]:
        if instance["name"] == "demo" and instance["state"] == "ready":
            return str(instance["url"])
    return None


def test() -> None:
    """Everything that CI checks."""
    run("ruff", "format", "--check", ".")
    run("ruff", "check", ".")
    run("lint-imports")
    run("mypy")
    # Tests wait more than they work, for servers to start above all; a file's live ones share some.
    for workers, way, which in (
        ("6", "worksteal", ("--ignore", "tests/live")),
        ("2", "loadfile", ("tests/live",)),
    ):
        if attempt("pytest", "--numprocesses", workers, "--dist", way, *which):
            # Time-outs are for a machine that does nothing else: what failed is run alone, once.
            run("pytest", "--last-failed", *which)
    run("python", "tests/bench/run.py", "--short")


def main() -> None:
    parser = argparse.ArgumentParser(description="Set up vllmops, and run it or its tests.")
    parser.add_argument("job", choices=["demo", "test"])
    given = parser.parse_args()
    if sys.version_info < (3, 11):
        sys.exit(f"vllmops needs Python 3.11 or newer, and this is {sys.version.split()[0]}")
    install()
    {"demo": demo, "test": test}[given.job]()


if __name__ == "__main__":
    main()
