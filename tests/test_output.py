"""The one place that prints."""

import json
import sys
import time
from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from rich.console import Console

from vllmops.app import parse_command_name
from vllmops.support import output
from vllmops.support.errors import ExitCode, VllmopsError
from vllmops.support.output import (
    FoldedLines,
    IndentedLine,
    JsonText,
    Progress,
    VerbatimText,
    format_bytes,
    format_duration,
    make_table,
    print_error,
    print_parts,
    print_to_stderr,
)
from vllmops.support.streams import UNSAFE, escape_json, make_printable

from .support.waiting import until


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
    assert format_bytes(count) == text


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
    assert format_duration(seconds) == text


def test_a_table_folds_and_does_not_cut() -> None:
    made = make_table("name", "bytes", right_columns=["bytes"])
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
    print_parts("x" * 150)
    print_to_stderr("[bold]" + "y" * 150)
    captured = capsys.readouterr()
    assert captured.out == "x" * 150 + "\n"
    assert captured.err == "[bold]" + "y" * 150 + "\n"


def test_a_log_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_parts(*map(VerbatimText, ["[red]", "x" * 500]))
    assert capsys.readouterr().out == "[red]\n" + "x" * 500 + "\n"


def test_progress_in_a_pipe_is_a_line_for_each_new_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "time", SimpleNamespace(time=lambda: 1065.0))
    with Progress(1000.0) as progress:
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
        assert progress.live_display is not None
        drawn = list[str]()

        def has_drawn_progress() -> bool:
            drawn.append(capsys.readouterr().err)
            return "loading" in "".join(drawn)

        until(has_drawn_progress)  # it is drawn four times a second
        progress.stop()
        assert progress.live_display is None
        progress.update("again")
    assert progress.live_display is None


def test_an_error_shows_its_hint(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(VllmopsError("usage", "it is [broken]", "vllmops hint [it]"), as_json=False)
    captured = capsys.readouterr()
    assert captured.err == "error: it is [broken]\n  hint: vllmops hint [it]\n"
    assert captured.out == ""
    print_error(VllmopsError("usage", "it"), as_json=False)
    assert "hint" not in capsys.readouterr().err


def test_the_envelope(capsys: pytest.CaptureFixture[str]) -> None:
    output.set_command_name("ps")
    output.print_envelope({"a": "ü", "b": None}, ExitCode.OK)
    captured = json.loads(capsys.readouterr().out)
    assert captured == {
        "version": 1,
        "command": "ps",
        "status": "ok",
        "exit_code": 0,
        "data": {"a": "ü", "b": None},
        "errors": [],
    }
    output.print_envelope([], ExitCode.FAILED)
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
    assert parse_command_name() == command


UNSEEN = [
    *map(chr, [*range(9), *range(11, 32), *range(127, 160)]),
    *"\u061c\u200b\u200e\u200f\u2028\u2029\u202a\u202e\u2060\u2066\u2069\ufeff",
    "\ud800",
    "\udcff",
    "\U000e0041",
]


def test_foreign_text_is_visible_and_as_wide() -> None:
    for item in UNSEEN:
        shown = make_printable(f"a{item}b")
        assert len(shown) == 3
        assert cell_len(shown) == 3
        assert shown.isprintable()
    for text in ("ä€漢字🙂", "👩\u200d💻", "a\u00a0b", "line\n\ttab"):
        assert make_printable(text) == text
    assert make_printable("a\n\tb", lines=False) == "a␊␉b"


@pytest.mark.parametrize("unseen", UNSEEN, ids=ascii)
def test_unsafe_characters_of_foreign_texts_are_never_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, unseen: str
) -> None:
    """By whatever way it is printed; SGR sequences of our own styles stay."""
    from rich.panel import Panel
    from rich.text import Text

    evil = f"a{unseen}[red]b[/]c"
    made = make_table(evil)
    made.add_row(evil)
    made.add_row(Text(evil, "bold"))
    print_parts(evil, Text(evil), made, Panel("x", title=Text(evil)), VerbatimText(evil))
    print_parts(FoldedLines((IndentedLine(2, evil, "red"),)), stderr=True)
    print_to_stderr(evil)
    with Progress(time.time()) as progress:
        progress.update(evil)
    print_error(VllmopsError("usage", evil, evil), as_json=False)
    captured = capsys.readouterr()
    assert not UNSAFE.search(captured.out + captured.err)
    assert "".join(captured.out.split()).count("[red]b[/]c") == 7
    monkeypatch.setattr(sys, "argv", ["vllmops", evil])
    print_error(VllmopsError("usage", evil, evil, data={evil: evil}), as_json=True)
    answer = capsys.readouterr().out
    assert not UNSAFE.search(answer)
    found = json.loads(answer)
    assert found["errors"][0]["message"] == evil
    assert found["data"] == {evil: evil}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", None])
def test_json_that_an_encoding_can_hold(encoding: str | None) -> None:
    text = json.dumps("ü漢🙂\u202e\x9b\x7f\ud800", ensure_ascii=False)
    safe = escape_json(text, encoding)
    assert json.loads(safe) == json.loads(text)
    assert not UNSAFE.search(safe)
    if encoding:
        safe.encode(encoding)


def test_json_lines_keep_their_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"a": "\u200b\u2028\x9b漢"}, ensure_ascii=False)
    print_parts(JsonText(text))
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_parts(JsonText(text))
    printed = capsys.readouterr().out
    assert json.loads(printed) == json.loads(text)
    assert not UNSAFE.search(printed)
    assert "漢" in printed
