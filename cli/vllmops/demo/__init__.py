"""Tiny models with random weights, built on the spot: a real vLLM without a GPU or a model hub."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from ..support.errors import VllmopsError
from ..support.home import create_folder, require_safe_folder, resolve_home

# Part of the directory's name: raise it when a recipe in `build` changes.
RECIPE = 3
BUILD_TIMEOUT_S = 300.0


class DemoKind(StrEnum):
    """What the model takes: Qwen2, Idefics3 (its processor needs no torchvision), Whisper.

    Mixtral, which takes text, is for data parallel engines that work together: vLLM has them for
    models with experts alone.
    """

    TEXT = "text"
    MOE = "moe"
    VISION = "vision"
    AUDIO = "audio"


def locate_model(kind: DemoKind) -> Path:
    """Where the demo model lies, or will lie.

    Raises:
        VllmopsError: ``home.unsafe``.
    """
    return require_safe_folder(resolve_home() / "demo" / f"{kind}-{RECIPE}")


def is_model_built(model_folder: Path) -> bool:
    """Whether a demo model lies there."""
    return (model_folder / "config.json").is_file()


def build_missing_model(kind: DemoKind) -> Path:
    """Where the demo model lies; it is built the first time, in some 5 seconds.

    Two builders at once do no harm: the model comes in one rename, and the first one stays.

    Raises:
        VllmopsError: ``demo.not-built``; ``demo.no-sound`` if vLLM could not decode any.
    """
    if kind is DemoKind.AUDIO and not find_spec("av"):
        raise VllmopsError(
            "demo.no-sound",
            "the audio demo model needs PyAV: vLLM can't decode audio without it",
            "pip install 'vllmops-cli[audio]'",
        )
    place = locate_model(kind)
    if is_model_built(place):
        return place
    try:
        create_folder(place.parent)
        build = subprocess.run(
            make_build_command(kind, place),
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise make_not_built_error(kind, place, str(error)) from error
    if build.returncode:
        last = next((line for line in reversed(build.stderr.splitlines()) if line.strip()), "")
        raise make_not_built_error(kind, place, last or f"exit status {build.returncode}")
    return place


def make_build_command(kind: DemoKind, model_folder: Path) -> list[str]:
    # -P: what lies in the working directory is no module of ours.
    return [sys.executable, "-P", "-m", "vllmops.demo.build", kind, str(model_folder)]


def make_not_built_error(kind: DemoKind, model_folder: Path, reason: str) -> VllmopsError:
    if "No module named" in reason:
        hint = "pip install 'vllmops-cli[gpu]', or without a GPU 'vllmops-cli[cpu]'"
    elif "Errno" in reason or "os error" in reason:
        hint = (
            f"{model_folder.parent} must be writable and have 10 MB free; VLLMOPS_HOME sets "
            "another place"
        )
    else:
        hint = f"to see the full error, run: {shlex.join(make_build_command(kind, model_folder))}"
    return VllmopsError("demo.not-built", f"the {kind} demo model was not built: {reason}", hint)


def make_serve_arguments(kind: DemoKind) -> tuple[str, ...]:
    """What vLLM needs to serve it; anything that follows on the command line wins."""
    length = "448" if kind is DemoKind.AUDIO else "2048"
    return (
        *("--served-model-name", f"demo-{kind}"),
        *("--enforce-eager", "--max-model-len", length, "--max-num-seqs", "16"),
        # Some CPU builds' bfloat16 kernels are instructions that some machines don't have.
        *("--dtype", "float32"),
        # 128 MiB, which a start fills with zeros: enough for 16 requests of twice the length.
        *("--kv-cache-memory-bytes", "134217728"),
    )


def make_serve_environment() -> dict[str, str]:
    """The environment vLLM needs to serve a demo model; nothing is fetched or reported."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
