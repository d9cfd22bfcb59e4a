"""The wheel, as somebody without this repository has it: built, installed, and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest

from vllmops import __version__

from .support.extent import EVERYTHING, long, programs
from .support.forks import FORKS, Answered
from .support.promises import TIMED
from .test_app import WORDS
from .test_packaging import MOST_BYTES, list_required_distributions

pytestmark = programs

ROOT = Path(__file__).parent.parent
STACKS = ROOT / "tests/rules/stacks/mm-cache-eviction-spin.txt"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def wheel_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, what it requires, and nothing else.

    What it requires are links to what is installed here; in the long form the index has it.
    """
    place = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    built = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", place, ROOT)
    subprocess.run([*pip, *built], check=True)
    (wheel,) = place.glob("vllmops_cli-*.whl")
    venv.create(place / "env", with_pip=False)
    python = place / "env/bin/python"
    alone = () if EVERYTHING else ("--no-deps",)
    subprocess.run([*pip, "--python", python, "install", *alone, wheel], check=True)
    if not EVERYTHING:
        (packages,) = (place / "env/lib").glob("python*/site-packages")
        (ours,) = distributions(name="vllmops-cli", path=[str(packages)])
        for item in list_required_distributions(ours.requires or ()):
            for name in {path.parts[0] for path in item.files or ()} - {"..", "__pycache__"}:
                (packages / name).symlink_to(str(item.locate_file(name)))
    return place / "env"


@pytest.fixture(scope="module")
def run(wheel_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A program of that environment, which knows nothing of this repository."""
    home = tmp_path_factory.mktemp("home")
    environment = {"PATH": os.defpath, "HOME": str(home), "VLLMOPS_HOME": str(home / "state")}

    def program(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [wheel_environment / "bin" / name, *words],
            env=environment,
            cwd=home,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )

    return program


def run_each(run: Run, lines: list[list[str]]) -> list[Answered]:
    """Run several commands as forks of one interpreter of that environment."""
    ran = run("python", FORKS, json.dumps(lines))
    assert ran.returncode == 0, ran.stderr
    answers: list[Answered] = json.loads(ran.stdout)
    return answers


@long  # else it has links to what `test_packaging` adds up
def test_the_base_install_is_light(wheel_environment: Path) -> None:
    found = os.walk(wheel_environment / "lib", followlinks=True)
    sizes = [Path(folder, name).stat().st_size for folder, _, names in found for name in names]
    assert sum(sizes) <= MOST_BYTES


def test_every_command_has_its_help(run: Run) -> None:
    assert run("vllmops", "--version").stdout == f"vllmops {__version__}\n"
    some = WORDS if EVERYTHING else list({item[0]: item for item in WORDS}.values())[::3]
    for answer in run_each(run, [[*item, "--help"] for item in some]):
        words = answer["words"][:-1]
        assert (answer["code"], answer["err"]) == (0, ""), words
        assert f"vllmops {' '.join(words)}" in " ".join(answer["out"].split()), words


def test_commands_that_need_no_vllm_work(run: Run) -> None:
    assert len(run("vllmops", "keygen").stdout.strip()) == 64
    answer = run("vllmops", "stacks", "explain", str(STACKS))
    assert "mm-cache-eviction-spin" in answer.stdout
    assert answer.returncode == 1
    answer = run("vllmops", "responses", "check-store", "sqlite:///responses.db", "--json")
    checks = json.loads(answer.stdout)["data"]["checks"]
    assert {item["problem"] for item in checks if item["name"] not in TIMED} == {""}


def test_the_manual_and_the_licence_are_in_it(run: Run, wheel_environment: Path) -> None:
    (package,) = (wheel_environment / "lib").glob("python*/site-packages/vllmops")
    manual = ROOT / "cli/vllmops/docs"
    names = {str(path.relative_to(manual)) for path in manual.rglob("*.md")}
    assert {str(path.relative_to(package / "docs")) for path in package.rglob("*.md")} == names
    assert "Find out what is wrong" in run("vllmops", "help", "doctor").stdout
    assert list(package.parent.glob("vllmops_cli-*.dist-info/licenses/LICENSE"))


def test_serve_without_vllm_says_how_to_install_it(run: Run) -> None:
    answer = run("vllmops", "serve", "some/model")
    assert answer.returncode == 1
    assert "vllmops-cli[gpu]" in answer.stderr
