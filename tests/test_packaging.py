"""What an installation brings."""

import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parent.parent / "pyproject.toml"
MOST_BYTES = 60_000_000


def base() -> dict[str, int]:
    """Bytes of each distribution that the base installation needs, by name."""
    found: dict[str, int] = {}
    left = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    while left:
        wanted = Requirement(left.pop())
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        here = distribution(wanted.name)
        name = here.metadata["Name"].lower()
        if name not in found:
            paths = [Path(str(here.locate_file(each))) for each in here.files or ()]
            found[name] = sum(path.stat().st_size for path in paths if path.is_file())
            left += here.requires or ()
    return found


def test_the_base_installation_is_small() -> None:
    sizes = base()
    assert {"typer", "rich", "pygments", "cryptography", "cffi", "httpcore"} <= sizes.keys()
    assert not {"numpy", "scipy", "pydantic", "torch"} & sizes.keys()
    assert all(sizes.values())
    assert sum(sizes.values()) < MOST_BYTES, sorted(sizes.items(), key=lambda item: -item[1])
