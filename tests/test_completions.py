from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPLETIONS = Path(__file__).parent.parent / "completions"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_are_what_the_command_prints(shell: str) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "vllmops", "completions", shell],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    kept = (COMPLETIONS / f"vllmops.{shell}").read_text()
    assert kept == printed, f"vllmops completions {shell} > completions/vllmops.{shell}"


def test_commands_and_instance_names_are_completed(tmp_path: Path) -> None:
    for name in ("night", "noon"):
        (tmp_path / "instances" / name).mkdir(parents=True)
    script = (
        f"source {COMPLETIONS}/vllmops.bash; COMP_WORDS=(vllmops $1); COMP_CWORD=$2; "
        "_vllmops_completion vllmops; echo ${COMPREPLY[@]}"
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def complete(words: str, position: int) -> list[str]:
        ran = subprocess.run(
            ["bash", "-c", script, "bash", words, str(position)],
            env={**os.environ, "PATH": path, "VLLMOPS_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        return ran.stdout.split()

    assert complete("sta", 1) == ["status", "stacks"]
    assert complete("logs n", 2) == ["night", "noon"]
    assert complete("logs nigh", 2) == ["night"]
    tmp_path.chmod(0o777)  # a command would say so; a tab does not
    assert complete("logs n", 2) == []
