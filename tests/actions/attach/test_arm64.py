"""The same tests on the other machine, in the long form: an emulated one takes minutes."""

from pathlib import Path

from ...support.extent import long
from . import emulated


@long  # three minutes, and packages to download
def test_injection_works_on_arm64(tmp_path: Path) -> None:
    shown = emulated.boot_guest(*emulated.guest(tmp_path))
    assert "aarch64 GNU/Linux" in shown
    assert "tests ended with 0" in shown, shown
