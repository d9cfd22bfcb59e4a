"""Numbers that are none, infinite, or too large to wait for: each option refuses them."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from vllmops import app
from vllmops.commands.options import parse_duration
from vllmops.servers import logs
from vllmops.supervision import supervisor
from vllmops.support.durations import format_utc_time
from vllmops.support.errors import ExitCode, VllmopsError
from vllmops.support.numbers import format_count
from vllmops.support.output import format_bytes, format_duration

from .support.in_process_command import run_in_process

NONE = ("nan", "-nan", "inf", "-inf", "Infinity", "1e400", "1e300", "-1", "1_0", "0x10", "", " 1")
MORE = ("\N{ARABIC-INDIC DIGIT THREE}", "9" * 5000, "1e", "1,5")
# Options whose values are words, though some of them look like numbers.
TIMES = {"since", "older_than", "store_ttl", "carrier_ttl", "overlap", "tolerance"}


def numeric(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every option of every command that takes a number or a time."""
    if hasattr(command, "list_commands"):
        context = typer.Context(command)
        for name in command.list_commands(context):
            _, found, _ = command.resolve_command(context, [name])
            yield from numeric(found, (*words, name))
        return
    for param in command.params:
        if param.type.name in {"seconds", "n", "time_"} or param.name in TIMES:
            yield words, param.opts[0]
        assert param.type.name not in {"integer", "float", "integer range", "float range"}, param


OPTIONS = sorted(set(numeric(app.build_root_command())))


def test_they_are_found() -> None:
    assert len(OPTIONS) > 30
    assert (("stop",), "--timeout") in OPTIONS
    assert (("keys", "rotate"), "--timeout") in OPTIONS


@pytest.mark.parametrize(("words", "option"), OPTIONS)
def test_an_option_refuses_them(words: tuple[str, ...], option: str) -> None:
    for text in NONE + MORE if words == ("stop",) else ("nan", "1e400", "1e300", MORE[0]):
        answer = run_in_process(*words, f"{option}={text}", "--json")
        assert (answer.code, answer.error["code"]) == (ExitCode.USAGE, "usage"), text
        assert option in answer.error["message"]


@pytest.mark.parametrize("text", [*NONE, *MORE, "0", "0d", "1e3", "36501d", "1.", "5 d", "1w"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(VllmopsError) as caught:
        parse_duration(text)
    assert caught.value.exit_code == ExitCode.USAGE


def test_times() -> None:
    assert [parse_duration(item) for item in ("90", "1.5m", "36h", "36500d")] == [
        90,
        90,
        129_600,
        36_500 * 86_400,
    ]


@pytest.mark.parametrize("name", ["VLLMOPS_LOG_MAX_BYTES", "VLLMOPS_CARRIER_TTL"])
@pytest.mark.parametrize("text", ["abc", "nan", "inf", "-1", "0", "1e300"])
def test_numbers_of_the_environment(
    vllmops: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    answer = vllmops("serve", str(tmp_path), "--json", env={name: text})
    assert (answer.code, answer.error["code"]) == (ExitCode.USAGE, "usage")
    assert name in answer.error["message"]
    # A supervisor that takes over reads it, too, and must not end by that.
    monkeypatch.setenv(name, text)
    assert supervisor.read_log_limit() == logs.LIMIT_BYTES


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -1e308, 1e18])
def test_numbers_of_others_are_shown(value: float) -> None:
    for show in (format_duration, format_bytes, format_utc_time):
        assert len(show(value)) < 400
    assert format_duration(value) == format_utc_time(value) == "-"
    assert format_bytes(10**400) == format_bytes(math.inf) == "-"


def test_a_clock_that_was_set_back() -> None:
    assert (format_duration(-0.4), format_duration(-75), format_utc_time(0.0)) == (
        "0s",
        "0s",
        "1970-01-01 00:00Z",
    )


def test_a_number_of_things() -> None:
    counts = [format_count(count, "request") for count in (0, 1, 2000)]
    assert counts == ["0 requests", "1 request", "2,000 requests"]
    assert [format_count(count, "process", "processes") for count in (1, 2)] == [
        "1 process",
        "2 processes",
    ]
