"""Applications' frameworks on stored responses, each in an environment of its own.

LlamaIndex does not take the client that the other tests use.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from ..support.extent import long
from . import clients
from .conftest import Live

PROGRAMS = Path(__file__).with_name("frameworks")


@long
@pytest.mark.parametrize(
    ("program", "packages"),
    [
        ("langchain.py", ["langchain-openai>=1.7,<2"]),
        ("llamaindex.py", ["llama-index-llms-openai>=0.8,<0.9"]),
    ],
)
def test_a_framework(text_pair: Live, tmp_path: Path, program: str, packages: list[str]) -> None:
    venv.create(tmp_path, with_pip=False)
    python = tmp_path / "bin/python"
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, "--python", python, "install", *packages], check=True)
    words = (python, PROGRAMS / program, clients.base(text_pair), clients.MODEL)
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
