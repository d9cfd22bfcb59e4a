"""What an installation brings."""

import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from .support.extent import long, programs

pytestmark = programs

CLI = Path(__file__).parent.parent / "cli"
PROJECT = Path(__file__).parent.parent / "pyproject.toml"
MOST_BYTES = 60_000_000


def list_required_distributions(requirements: Iterable[str]) -> list[Distribution]:
    """What is installed here of what a distribution requires, and of what that requires …"""
    found: dict[str, Distribution] = {}
    left = list(requirements)
    while left:
        wanted = Requirement(left.pop())
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        here = distribution(wanted.name)
        if here.name.lower() not in found:
            found[here.name.lower()] = here
            left += here.requires or ()
    return list(found.values())


def size(installed: Distribution) -> int:
    """Its bytes."""
    paths = [Path(str(installed.locate_file(item))) for item in installed.files or ()]
    return sum(path.stat().st_size for path in paths if path.is_file())


def test_the_base_installation_is_small() -> None:
    base = list_required_distributions(
        tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    )
    sizes = {entry.name.lower(): size(entry) for entry in base}
    assert {"typer", "rich", "pygments", "cryptography", "cffi", "httpcore"} <= sizes.keys()
    assert not {"numpy", "scipy", "pydantic", "torch"} & sizes.keys()
    assert all(sizes.values())
    assert sum(sizes.values()) < MOST_BYTES, sorted(sizes.items(), key=lambda item: -item[1])


def wheel(folder: Path, name: str, script: str) -> Path:
    """A tiny wheel of somebody else's with a command."""
    path = folder / f"{name}-0.3.1-py3-none-any.whl"
    info = f"{name}-0.3.1.dist-info"
    parts = {
        f"{name}_other/__init__.py": "def main(): print('not ours')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.3.1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{script} = {name}_other:main\n",
    }
    record = "".join(f"{item},,\n" for item in (*parts, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as file:
        for item, content in {**parts, f"{info}/RECORD": record}.items():
            file.writestr(item, content)
    return path


def read_version_stderr(path: Path, environment: dict[str, str]) -> str:
    """What ``--version`` says on stderr with a directory of packages in the way."""
    done = subprocess.run(
        [sys.executable, "-m", "vllmops", "--version"],
        env={**os.environ, **environment, "PYTHONPATH": f"{CLI}{os.pathsep}{path}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("vllmops ")
    assert done.stderr.count("\n") <= 1
    return done.stderr


@pytest.mark.parametrize(
    ("name", "script", "words"),
    [
        ("vllmops", "vllmops", True),
        pytest.param("vllmops", "ops", True, marks=long),
        ("stranger", "vllmops", True),
        ("stranger", "vllmops-extra", False),
    ],
)
def test_another_package_of_that_name_is_told(
    tmp_path: Path, name: str, script: str, words: bool
) -> None:
    place = tmp_path / "packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run(
        [*pip, "--target", str(place), str(wheel(tmp_path, name, script))],
        check=True,
        env={item: value for item, value in os.environ.items() if item != "PYTHONPATH"},
    )
    line = read_version_stderr(place, {})
    assert (f"package {name} 0.3.1 in {place}" in line) is words
    # Its script is on the PATH, too, ahead of ours.
    line = read_version_stderr(tmp_path, {"PATH": f"{place / 'bin'}:{os.environ['PATH']}"})
    assert (str(place / "bin" / "vllmops") in line) is (script == "vllmops")


def test_ours_alone_is_not_told(tmp_path: Path) -> None:
    bin_ = tmp_path / "vllmops"
    bin_.write_text("#!/usr/bin/env python\nfrom vllmops.app import main\nmain()\n")
    bin_.chmod(0o755)
    assert read_version_stderr(tmp_path, {"PATH": f"{tmp_path}:{os.environ['PATH']}"}) == ""
