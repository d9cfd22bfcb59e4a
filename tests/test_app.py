"""The contract that every command keeps: one envelope, exit codes, help, no traceback."""

import inspect
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from vllmops import __version__, app
from vllmops.app import COMMANDS
from vllmops.support.errors import ExitCode

from .support.extent import EVERYTHING, sample_cases
from .support.in_process_command import run_in_process

KEYS = ["version", "command", "status", "exit_code", "data", "errors"]


def nodes() -> list[tuple[str, ...]]:
    """Every command's words: ``("ps",)``, ``("cache", "inspect")`` …"""
    found: list[tuple[str, ...]] = []
    for name, entry in COMMANDS.items():
        if entry.has_subcommands:
            _, command, _ = resolve_command(name)
            found += [(name, item) for item in command.commands]
        else:
            found.append((name,))
    return found


def resolve_command(name: str) -> Any:
    import click

    group = app.build_root_command()
    return group.resolve_command(click.Context(group), [name])


WORDS = nodes()


def test_there_is_a_command_for_each_name() -> None:
    assert len(WORDS) >= len(COMMANDS)
    for name in COMMANDS:
        assert resolve_command(name)[1] is not None


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_the_help_of_a_command_says(name: str) -> None:
    command = resolve_command(name)[1]
    assert inspect.cleandoc(command.help).partition("\n\n")[0] == COMMANDS[name].help


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_every_command_has_help_with_an_example(words: tuple[str, ...]) -> None:
    for flag in ("--help", "-h"):
        answer = run_in_process(*words, flag)
        assert (answer.code, answer.err) == (0, "")
    text = " ".join(answer.out.replace("│", " ").split())
    assert f"vllmops {' '.join(words)}" in text.partition("Usage:")[2]
    assert "Example" in text
    assert f"vllmops {' '.join(words)}" in text.partition("Example")[2]


# What completions prints is a script, in any case.
@pytest.mark.parametrize(
    "words", sample_cases([w for w in WORDS if w != ("completions",)], 3), ids=" ".join
)
def test_every_command_keeps_the_envelope(
    vllmops: Any, words: tuple[str, ...], standin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A usage error, and an answer or an error of its own; ``--json`` in any place."""
    # `patches` tries them in a process of its own, which imports vLLM: a small one.
    monkeypatch.setenv("PYTHONPATH", str(standin), prepend=os.pathsep)
    answers = [
        run_in_process(*words, "--json", "--no-such-option"),
        run_in_process(*words, "--no-such-option", "--json", "--", "--x"),
        vllmops(*words, "--json"),
        vllmops("--json", *words),
    ]
    untargeted = {("ps",), ("serve",), ("patches", "show"), ("memory", "report")}
    untargeted |= {("stacks", "explain"), ("help",)}
    needy = ("show", "cancel", "delete", "purge", "export", "import", "check-store")
    untargeted |= {(noun, item) for noun in ("responses", "conversations") for item in needy}
    untargeted |= {("requests", "show"), ("requests", "abort"), ("probe",)}
    untargeted |= {("integrate", "systemd"), ("integrate", "kubernetes")}
    if words not in untargeted and words[0] not in {"keygen", "keys"}:
        answers.append(vllmops(*words, "--json", "--target", "nobody"))
        assert answers[-1].code == ExitCode.NOT_FOUND
    for answer in answers:
        found = json.loads(answer.out)
        assert list(found) == KEYS
        assert (found["version"], found["command"]) == (1, " ".join(words))
        assert found["exit_code"] == answer.code
        assert found["status"] == ("error" if found["errors"] else "ok")
        for error in found["errors"]:
            assert set(error) == {"code", "message", "hint", "page"}
            assert error["page"] == error["code"]
            assert error["code"]
            assert error["message"]
        assert answer.err == ""
    assert [answer.code for answer in answers[:2]] == [2, 2]


@pytest.mark.parametrize(
    "words", [("nonsense",), ("cache", "nonsense"), ("--nonsense",), ("ps", "extra")]
)
def test_words_that_mean_nothing(vllmops: Any, words: tuple[str, ...]) -> None:
    answer = vllmops(*words, "--json")
    assert (answer.code, answer.error["code"]) == (2, "usage")
    answer = vllmops(*words)
    assert (answer.code, answer.out) == (2, "")
    assert words[-1] in answer.err


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("stauts",), "Did you mean 'status'", "vllmops --help"),
        (("cache", "insp"), "Did you mean 'inspect'", "vllmops cache --help"),
        (("ps", "--jsn"), "--json", "vllmops ps --help"),
        (("heal", "--only"), "requires an argument", "vllmops heal --help"),
        (("cache", "inspect", "-t"), "requires an argument", "vllmops cache inspect --help"),
    ],
)
def test_a_slip_of_the_fingers(
    vllmops: Any, words: tuple[str, ...], message: str, hint: str
) -> None:
    answer = vllmops(*words)
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err
    assert answer.err.endswith(f"  hint: {hint}\n")


def test_options_of_vllm_before_the_dashes(vllmops: Any) -> None:
    hint = vllmops("serve", "M", "--max-model-len", "8192", "--json").error["hint"]
    assert hint.endswith("arguments for vLLM come after --: vllmops serve MODEL -- VLLM ARGUMENTS")
    assert vllmops("serve", "--name", "--json").error["hint"] == "vllmops serve --help"


@pytest.mark.parametrize("words", [(), ("cache",), ("stacks",), ("--help",), ("-h",)])
def test_a_word_alone_shows_what_there_is(vllmops: Any, words: tuple[str, ...]) -> None:
    answer = vllmops(*words)
    assert "Usage: vllmops" in answer.out + answer.err
    assert "Traceback" not in answer.err
    if not words or words[0].startswith("-"):
        for name in COMMANDS:
            assert name in answer.out + answer.err


def test_json_behind_the_dashes_is_not_ours(vllmops: Any, home: Path) -> None:
    answer = vllmops("serve", "--", "--json")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error: give either a MODEL or --demo")


def test_the_version(vllmops: Any) -> None:
    assert vllmops("--version").out == f"vllmops {__version__}\n"
    assert vllmops("--version", "ps").out == f"vllmops {__version__}\n"


def make_ps_fail(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make ``ps`` fail in a way that nobody foresaw."""
    from vllmops.commands import ps

    def find() -> None:
        raise error

    monkeypatch.setattr(ps, "list_servers", find)


def test_an_error_that_nobody_foresaw(vllmops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_ps_fail(monkeypatch, ZeroDivisionError("by [zero]"))
    answer = vllmops("ps", "--json")
    assert (answer.code, answer.err) == (1, "")
    assert answer.error == {
        "code": "internal",
        "message": "unexpected ZeroDivisionError: by [zero]",
        "hint": "run it again with VLLMOPS_DEBUG=1 for the traceback",
        "page": "internal",
    }
    answer = vllmops("ps")
    assert (answer.code, answer.out) == (1, "")
    assert "Traceback" not in answer.err
    assert "by [zero]" in answer.err


def test_a_traceback_when_asked_for(home: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "vllmops", "status", "nobody"],
        env={**os.environ, "VLLMOPS_DEBUG": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode != 0
    assert "Traceback" in answer.stderr
    assert "nobody" in answer.stderr


def test_interrupted(vllmops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_ps_fail(monkeypatch, KeyboardInterrupt())
    answer = vllmops("ps", "--json")
    assert (answer.code, answer.error["code"]) == (130, "interrupted")
    answer = vllmops("ps")
    assert (answer.code, answer.err) == (130, "error: interrupted\n")


def test_help_imports_no_slow_module(home: Path) -> None:
    code = """
import sys
sys.argv = ["vllmops", "--help"]
from vllmops.app import run_command
run_command()
slow = {"vllm", "torch", "transformers", "httpx", "psutil", "msgspec", "prometheus_client"}
print(sorted(slow & {name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stderr == "[]\n"


LOADED = """
import sys
from vllmops.app import run_command
{run}
print(*(name for name in sys.modules if name.startswith("vllmops")), file=sys.stderr)
"""


def list_loaded_modules(run: str) -> list[str]:
    words = [sys.executable, "-c", LOADED.format(run=run)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stderr.split()


def test_commands_load_only_what_they_need(home: Path) -> None:
    listing = list_loaded_modules("import vllmops.commands.ps")  # a server may run that needs more
    assert len(listing) <= 40
    plan = list_loaded_modules('sys.argv = ["vllmops", "serve", "--dry-run", "m"]; run_command()')
    assert "vllmops.supervision.launch" in plan
    assert not [name for name in plan if name.startswith("vllmops.bundle")]
    assert not [name for name in (*listing, *plan) if name.startswith("vllmops_responses")]


@pytest.mark.parametrize("words", sample_cases(WORDS, 3), ids=" ".join)
def test_help_on_a_narrow_terminal(
    vllmops: Any, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    answers = [run_in_process(*words, "--help")]
    if EVERYTHING or words in WORDS[::10]:  # on a real one it is the same
        monkeypatch.delenv("COLUMNS")
        answers.append(vllmops(*words, "--help", columns=60))
    for answer in answers:
        assert answer.code == 0
        assert max(map(len, answer.out.splitlines())) <= 60
        assert "…" not in answer.out


INTERRUPTED_AT = """
import builtins, os, signal, sys
from vllmops.app import main
moment = sys.argv.pop(1)
found = builtins.__import__

def noticed(name, globals=None, locals=None, fromlist=(), level=0):
    if moment in {name, *(fromlist or ())}:
        builtins.__import__ = found
        os.kill(os.getpid(), signal.SIGINT)
    return found(name, globals, locals, fromlist, level)

builtins.__import__ = noticed
main()
"""


MOMENTS = ("streams", "re", "typer", "shutil", "errors", "inspect", "msgspec", "rich", "table")
LISTS = (("keys", "list"), ("keys", "list", "--json"))
INTERRUPTED = product(MOMENTS, LISTS) if EVERYTHING else zip(MOMENTS, cycle(LISTS), strict=False)


@pytest.mark.parametrize(("moment", "words"), list(INTERRUPTED))
def test_interrupted_while_it_starts(home: Path, moment: str, words: tuple[str, ...]) -> None:
    """At an import, by a real signal: the first 100 ms are imports."""
    answer = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT, moment, *words],
        capture_output=True,
        text=True,
        check=False,
    )
    spoken = answer.stdout + answer.stderr
    assert "Traceback" not in spoken
    assert "ignored" not in spoken
    assert answer.returncode in {130, ExitCode.FAILED}  # what is not imported interrupts nothing
    if moment in {"streams", "typer"}:
        assert answer.returncode == 130
        assert "interrupted" in spoken


def stdout_to(path: str) -> Callable[[], object]:
    return lambda: os.dup2(os.open(path, os.O_WRONLY), 1)


def no_reader() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


@pytest.mark.parametrize(
    "words", [("--version",), ("--help",), ("ps",), ("ps", "--json"), ("keygen",), ("keys", "add")]
)
def test_a_full_disk_is_told_and_a_reader_that_left_is_not(
    vllmops: Any, words: tuple[str, ...]
) -> None:
    answer = vllmops(*words, before=stdout_to("/dev/full"))
    assert answer.code == 1
    assert "error: standard output: No space left on device\n" in answer.err
    answer = vllmops(*words, before=lambda: os.close(1))
    assert answer.code == 1
    assert "error: standard output: Bad file descriptor\n" in answer.err
    answer = vllmops(*words, before=no_reader)
    assert answer.code == 0
    assert "error" not in answer.err


def test_exit_code_is_unchanged_when_nothing_reads_the_output(vllmops: Any) -> None:
    assert vllmops("keys", "list", "--json", before=no_reader).code == ExitCode.FAILED


def test_following_ends_with_its_reader(lab: Any) -> None:
    lab.serve("a")
    assert lab.vllmops("logs", "-f", "a", before=no_reader).code == 0


@pytest.mark.parametrize(
    "columns", ["0", "1", "20", "-7", "many", "", "1000000000", "9" * 5000, "\u00b2"]
)
def test_any_width_shows_everything(vllmops: Any, columns: str) -> None:
    vllmops("keys", "add")
    whole = Counter(vllmops("keys", "list").out.replace("─", "").replace(" ", ""))
    answer = vllmops("keys", "list", env={"COLUMNS": columns})
    assert answer.code == 0
    assert Counter(answer.out) >= whole  # every letter, on whatever line
    assert len(answer.out) < 20_000
