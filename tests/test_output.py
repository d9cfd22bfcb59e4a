"""The one place that prints."""

import sys
import time

import pytest
from rich.console import Console

from vllmops import output
from vllmops.errors import Exit, VllmopsError
from vllmops.output import Progress, Verbatim, fail, invoked, say, show, size, span, table


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1.5 * 2**20, "1.5 MiB"),
        (2**30, "1.0 GiB"),
        (2.25 * 2**40, "2.2 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes(count: float | None, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0s"),
        (59.9, "59s"),
        (60, "1m00s"),
        (185, "3m05s"),
        (7800, "2h10m"),
        (86400 * 3 + 4 * 3600, "3d04h"),
    ],
)
def test_spans(seconds: float | None, text: str) -> None:
    assert span(seconds) == text


def test_a_table_folds_and_does_not_cut() -> None:
    made = table("name", "bytes", right=["bytes"])
    made.add_row("a" * 100, "1")
    console = Console(width=60, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(made)
    text = console.export_text()
    assert text.count("a") == 100 + "name".count("a")
    assert max(map(len, text.splitlines())) <= 60


def test_a_pipe_gets_whole_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    show("x" * 150)
    say("[bold]" + "y" * 150)
    captured = capsys.readouterr()
    assert captured.out == "x" * 150 + "\n"
    assert captured.err == "[bold]" + "y" * 150 + "\n"


def test_a_log_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    show(*map(Verbatim, ["[red]", "x" * 500]))
    assert capsys.readouterr().out == "[red]\n" + "x" * 500 + "\n"


def test_progress_in_a_pipe_is_a_line_for_each_new_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress(time.time() - 65) as progress:
        for text in ("loading", "loading", "[ready]"):
            progress.update(text)
    captured = capsys.readouterr()
    assert captured.err == " 1m05s  loading\n 1m05s  [ready]\n"
    assert captured.out == ""
    with Progress(time.time(), quiet=True) as progress:
        progress.update("loading")
    assert capsys.readouterr().err == ""


def test_progress_in_a_terminal_ends_without_a_trace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with Progress(time.time()) as progress:
        progress.update("loading")
        assert progress.live is not None
        time.sleep(0.4)  # it is drawn four times a second
        progress.stop()
        assert progress.live is None
        progress.update("again")
    assert progress.live is None
    assert "loading" in capsys.readouterr().err


def test_an_error_says_what_mends_it(capsys: pytest.CaptureFixture[str]) -> None:
    fail(VllmopsError("a.b", "it is [broken]", "vllmops mend [it]"), as_json=False)
    captured = capsys.readouterr()
    assert captured.err == "error: it is [broken]\n  mend: vllmops mend [it]\n"
    assert captured.out == ""
    fail(VllmopsError("a.b", "it"), as_json=False)
    assert "mend" not in capsys.readouterr().err


def test_the_envelope(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    monkeypatch.setattr(sys, "argv", ["vllmops", "ps", "--json"])
    output.envelope({"a": "ü", "b": None}, Exit.OK)
    captured = json.loads(capsys.readouterr().out)
    assert captured == {
        "version": 1,
        "command": "ps",
        "status": "ok",
        "exit_code": 0,
        "data": {"a": "ü", "b": None},
        "errors": [],
    }
    output.envelope([], Exit.FAILED)
    assert json.loads(capsys.readouterr().out)["status"] == "findings"


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ([], ""),
        (["ps"], "ps"),
        (["ps", "--json"], "ps"),
        (["cache", "inspect", "x"], "cache inspect"),
        (["nonsense", "x"], "nonsense"),
        (["stop", "demo", "--json"], "stop"),
    ],
)
def test_which_command_was_typed(
    monkeypatch: pytest.MonkeyPatch, words: list[str], command: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["vllmops", *words])
    assert invoked() == command
