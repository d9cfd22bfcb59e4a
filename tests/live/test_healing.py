"""Every state that is healed, at random and under load, 50 times each or for 4 hours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..support.extent import long
from .conftest import Cli

MINUTES = os.environ.get("VLLMOPS_SOAK_MINUTES", "240")


@long
def test_every_state_is_healed_and_nothing_else_is_lost(cli: Cli, tmp_path: Path) -> None:
    words = ["-m", "tests.live.healing", "--minutes", MINUTES, "--out", str(tmp_path / "soak.json")]
    ran = subprocess.run(
        [sys.executable, *words],
        env=cli.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print(ran.stdout)  # pytest -rP shows it
    assert ran.returncode == 0, ran.stdout + ran.stderr
