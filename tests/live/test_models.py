"""Real builds; they need transformers, which comes with vLLM."""

import json
import os
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import vllmops
from vllmops import demo
from vllmops.demo import DemoKind
from vllmops.support.errors import VllmopsError

from ..support.extent import long


@pytest.fixture(scope="module")
def demo_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory in which two builders at once have built the text model.

    Their working directory holds a module that would break the build.
    """
    home = tmp_path_factory.mktemp("demo")
    (home / "transformers.py").write_text("raise ImportError('not this one')")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(max_workers=2) as pool:
        patch.setenv("VLLMOPS_HOME", str(home))
        patch.chdir(home)
        one, other = pool.map(demo.build_missing_model, (DemoKind.TEXT, DemoKind.TEXT))
    assert one == other
    return home


def test_a_model_is_a_few_megabytes_and_whole(demo_home: Path) -> None:
    place = demo_home / "demo" / f"text-{demo.RECIPE}"
    config = json.loads((place / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert (place / "tokenizer.json").is_file()
    assert 1e6 < sum(file.stat().st_size for file in place.iterdir()) < 10e6


def test_two_builders_at_once_leave_one_model_and_nothing_else(demo_home: Path) -> None:
    assert [item.name for item in (demo_home / "demo").iterdir()] == [f"text-{demo.RECIPE}"]


def test_a_model_is_built_once(demo_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLMOPS_HOME", str(demo_home))
    # Nothing could be built with this one.
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert (demo.build_missing_model(DemoKind.TEXT) / "config.json").is_file()


def test_asking_imports_neither_torch_nor_transformers(demo_home: Path) -> None:
    code = (
        "import sys; from vllmops import demo; demo.build_missing_model(demo.DemoKind.TEXT);"
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)"
    )
    env = {**os.environ, "VLLMOPS_HOME": str(demo_home)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=30)


@long
def test_a_killed_builder_leaves_nothing_that_passes_for_a_model(home: Path) -> None:
    place = home / "demo" / "text"
    place.parent.mkdir()
    child = subprocess.Popen(demo.make_build_command(DemoKind.TEXT, place))
    try:
        deadline = time.monotonic() + 60
        # As soon as there is a file, so in the middle of writing.
        while not [*place.parent.glob("*/*"), *place.parent.glob(".*/*")]:
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        child.kill()
        child.wait(10)
    assert child.returncode == -signal.SIGKILL
    assert not place.exists()


def error_of(kind: DemoKind) -> VllmopsError:
    with pytest.raises(VllmopsError) as raised:
        demo.build_missing_model(kind)
    assert raised.value.code == "demo.not-built"
    return raised.value


def test_no_directory_can_be_made(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").touch()
    monkeypatch.setenv("VLLMOPS_HOME", str(home / "file"))
    error = error_of(DemoKind.TEXT)
    assert "Not a directory" in error.message
    assert f"{home}/file/demo must be writable" in error.hint


@long
def test_a_full_disk(home: Path, full_disk: Callable[[], None]) -> None:
    # 256 KiB in all: the files before the weights still fit.
    error = error_of(DemoKind.TEXT)
    assert "No space left on device" in error.message
    assert "10 MB free" in error.hint
    assert list((home / "demo").iterdir()) == []


def test_a_builder_that_breaks_off_is_quoted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = home / "broken"
    broken.mkdir()
    (broken / "transformers.py").write_text("raise ImportError('operator nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    error = error_of(DemoKind.TEXT)
    assert error.message.endswith("ImportError: operator nms does not exist")
    assert "-m vllmops.demo.build text" in error.hint


@pytest.mark.parametrize(
    ("kind", "code", "hint"),
    [
        ("text", "demo.not-built", "pip install 'vllmops-cli[gpu]'"),
        ("audio", "demo.no-sound", "pip install 'vllmops-cli[audio]'"),
    ],
)
def test_without_vllm_the_hint_is_to_install_it(
    home: Path, kind: str, code: str, hint: str
) -> None:
    bare = home / "bare"
    venv.create(bare, symlinks=True)
    program = (
        "from vllmops import demo; from vllmops.support import errors\n"
        f"try: demo.build_missing_model(demo.DemoKind({kind!r}))\n"
        "except errors.VllmopsError as error: print(error.code, error.hint, sep='|')"
    )
    env = {
        "VLLMOPS_HOME": str(home),
        "PYTHONPATH": str(Path(vllmops.__file__).parent.parent),
        "PATH": os.environ["PATH"],
    }
    words = subprocess.run(
        [bare / "bin" / "python", "-c", program],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert words.startswith(f"{code}|{hint}")


def test_a_demo_is_served_under_a_short_name_and_offline() -> None:
    for kind in DemoKind:
        arguments = demo.make_serve_arguments(kind)
        assert arguments[arguments.index("--served-model-name") + 1] == f"demo-{kind}"
    assert demo.make_serve_environment()["HF_HUB_OFFLINE"] == "1"
