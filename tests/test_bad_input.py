"""Every command with every bad input: an answer or an error of ours, a code of the contract, soon.

Each test takes one bad input, and some of the commands: over the tests each has its turns.
``VLLMOPS_TEST_ALL=1`` takes all of them with all of it, which takes minutes. Commands, their
options and what these take are read from the program itself, so a new one is tried without a word
here.
"""

import importlib.readers
import itertools
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from vllmops.app import COMMANDS
from vllmops.support.errors import ExitCode
from vllmops.support.streams import UNSAFE

from .support.extent import EVERYTHING, long

# A user who may not read this Python's library would not find what is imported late.
assert importlib.readers

TURNS = 1  # commands, or places in them, for each bad input
TIMEOUT_S = 60.0  # only what hangs takes longer
IMPORT_S = 90.0  # of `patches` without a target: the import of vLLM takes 10 s of CPU by itself
NOBODY = 65534
FAR = f"/{'x' * 200}" * 30  # more than the 4096 characters that Linux takes
ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\u202eevil\u2028\rover\x7f"


@dataclass(frozen=True)
class Leaf:
    """A command: its words, and its parameters as click sees them."""

    words: tuple[str, ...]
    params: tuple[Any, ...]

    def line(self, bad: Any = None, value: str = "", *, given: str = "x") -> list[str]:
        """A command line where one parameter has a bad value and all that is needed is there."""
        flags = [param.opts[0] for param in self.params if param.name == "dry_run"]
        line = [*self.words, *flags]
        behind = []
        for param in self.params:
            if param.param_type_name == "argument":
                if param is bad:
                    behind.append(value)
                elif param.required:
                    behind.append(sample(param, given))
            elif param is bad:
                line.append(f"{param.opts[0]}={value}")
        # An argument that begins with a dash would be an option.
        return [*line, *(["--"] if behind and self.words != ("serve",) else []), *behind]


def sample(param: Any, given: str) -> str:
    choices = getattr(param.type, "choices", None)
    return str(getattr(choices[0], "value", choices[0])) if choices else given


def leaves() -> Iterator[Leaf]:
    for name, entry in COMMANDS.items():
        command = entry.import_command()
        if entry.has_subcommands:
            for word, each in command.commands.items():
                yield Leaf((name, word), tuple(each.params))
        else:
            yield Leaf((name,), tuple(command.params))


LEAVES = list(leaves())


def places(*kinds: str, names: str = "") -> list[tuple[Leaf, Any]]:
    """Every parameter whose type is of these kinds, with its command."""
    return [
        (leaf, param)
        for leaf in LEAVES
        for param in leaf.params
        if any(kind in type(param.type).__name__ for kind in kinds)
        and (not names or param.name in names.split())
    ]


def turns(all_of_them: list[Any], number: int) -> list[Any]:
    """Those whose turn it is at a bad input of that number."""
    if EVERYTHING or len(all_of_them) <= TURNS:
        return all_of_them
    if all_of_them is LEAVES:  # each of them once, by all inputs together
        count = len(STREAMS) + len(TERMINALS) + len(HOMES) + len(LIMITS)
        return all_of_them[number * len(LEAVES) // count : (number + 1) * len(LEAVES) // count]
    start = number * TURNS
    return [all_of_them[(start + each) % len(all_of_them)] for each in range(TURNS)]


@dataclass
class Trial:
    """Runs commands, and keeps what is wrong with how they end."""

    vllmops: Any
    wrong: list[str] = field(default_factory=list)
    count: int = 0

    def run_variants(self, leaf: Leaf, line: list[str], *more: str, **how: Any) -> None:
        """Run it as it is, and with further words; where not everything is run, one of them."""
        ways = ["", *more]
        self.count += 1
        for word in ways if EVERYTHING else [ways[self.count % len(ways)]]:
            here = len(leaf.words)
            self.run([*leaf.words, *([word] if word else []), *line[here:]], **how)

    def run(self, words: list[str], **how: Any) -> Any:
        shown = " ".join(repr(word)[:60] for word in words)
        try:
            limit_s = IMPORT_S if words[0] == "patches" else TIMEOUT_S
            answer = self.vllmops(*words, timeout_s=limit_s, **how)
        except AssertionError as error:
            self.wrong.append(f"{shown}: {error}")
            return None
        said = answer.out + answer.err
        faults = [
            word for word in ("Traceback", "unexpected ", "Exception ignored") if word in said
        ]
        if answer.code not in list(ExitCode):
            faults.append(f"code {answer.code}")
        if found := UNSAFE.search(said.replace("\r", "") if "columns" in how else said):
            faults.append(f"raw {found[0]!r}")
        if faults:
            self.wrong.append(f"{shown}: {', '.join(faults)}: {said[-900:]}")
        return answer


@pytest.fixture
def trial(
    vllmops: Any,
    standin: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Trial]:
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))  # what is written by a relative name
    # `patches` tries them in a process of its own, which imports vLLM: a small one.
    monkeypatch.setenv("PYTHONPATH", str(standin), prepend=os.pathsep)
    made = Trial(vllmops)
    yield made
    assert not made.wrong, f"{len(made.wrong)} wrong:\n" + "\n".join(made.wrong)


NUMBERED = itertools.count()


def parametrize_with_numbers(cases: dict[str, Any], *roots: str) -> pytest.MarkDecorator:
    """Each case with its number, for the turns; over all the tests, so that none starts anew.

    Args:
        cases: by name.
        roots: names of those that only root can run.
    """
    found = [
        pytest.param(
            next(NUMBERED), case, id=name, marks=pytest.mark.root_only if name in roots else ()
        )
        for name, case in cases.items()
    ]
    return pytest.mark.parametrize(("number", "case"), found)


# Streams


def make_stream_closer(*numbers: int) -> Callable[[], object]:
    def close() -> None:
        for number in numbers:
            os.close(number)
        # What the interpreter itself does at its start.
        sys.stdin = None if 0 in numbers else sys.stdin
        sys.stdout = None if 1 in numbers else sys.stdout
        sys.stderr = None if 2 in numbers else sys.stderr

    return close


def make_stream_redirect(number: int, path: str, mode: int = os.O_RDWR) -> Callable[[], object]:
    return lambda: os.dup2(os.open(path, mode), number)


def cut_off(number: int) -> Callable[[], object]:
    def cut() -> None:
        reader, ours = os.pipe()
        os.close(reader)
        os.dup2(ours, number)

    return cut


def combine_setups(*several: Callable[[], object]) -> Callable[[], object]:
    return lambda: [each() for each in several]


STREAMS = {
    "stdin closed": make_stream_closer(0),
    "stdin is a directory": make_stream_redirect(0, "/", os.O_RDONLY),
    "stdin is for writing": make_stream_redirect(0, "/dev/null", os.O_WRONLY),
    "stdin without end": make_stream_redirect(0, "/dev/zero"),
    "stdout closed": make_stream_closer(1),
    "stdout full": make_stream_redirect(1, "/dev/full"),
    "stdout cut off": cut_off(1),
    "stdout for reading": make_stream_redirect(1, "/dev/null", os.O_RDONLY),
    "stderr closed": make_stream_closer(2),
    "stderr full": make_stream_redirect(2, "/dev/full"),
    "stderr cut off": cut_off(2),
    "stdout and stderr full": combine_setups(
        make_stream_redirect(1, "/dev/full"), make_stream_redirect(2, "/dev/full")
    ),
    "stdout and stderr cut off": combine_setups(cut_off(1), cut_off(2)),
    "all closed": make_stream_closer(0, 1, 2),
}


@parametrize_with_numbers(STREAMS)
def test_streams(trial: Trial, number: int, case: Callable[[], object]) -> None:
    for leaf in turns(LEAVES, number):
        trial.run_variants(leaf, leaf.line(), "--json", "--help", before=case)
    trial.run(["--version"], before=case)
    trial.run(["nonsense"], before=case)


# Terminals and locales


def make_encoding_setter(encoding: str) -> Callable[[], object]:
    def speak() -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(encoding=encoding)  # type: ignore[union-attr]

    return speak


TERMINALS: dict[str, dict[str, Any]] = {
    **{f"COLUMNS={text}": {"env": {"COLUMNS": text}} for text in ("0", "1", "20", "-5", "²", "x")},
    "COLUMNS=10^9": {"env": {"COLUMNS": "1000000000", "LINES": "1000000000"}},
    "LINES=0": {"env": {"LINES": "0"}},
    **{f"{count} columns": {"columns": count} for count in (0, 1, 20, 5000)},
    "no TERM": {"columns": 80, "before": lambda: os.environ.pop("TERM", None)},
    "TERM=dumb": {"columns": 80, "env": {"TERM": "dumb"}},
    "TERM=nonsense": {"columns": 80, "env": {"TERM": "\udcff%s"}},
    "NO_COLOR": {"columns": 80, "env": {"NO_COLOR": "1"}},
    "ascii": {"before": make_encoding_setter("ascii"), "env": {"LANG": "C"}},
    "latin-1": {"before": make_encoding_setter("latin-1")},
}


@parametrize_with_numbers(TERMINALS)
def test_terminals(trial: Trial, number: int, case: dict[str, Any]) -> None:
    for leaf in turns(LEAVES, number):
        trial.run_variants(leaf, leaf.line(), "--help", **case)
    answer = trial.run(["keys", "add"], **case)
    assert answer
    assert answer.code == 0
    answer = trial.run(["keys", "list"], **case)
    assert answer
    assert answer.code == 0
    assert answer.out.strip()


# Places for the state


def with_home(name: str) -> Callable[[Path], dict[str, Any]]:
    return lambda place: {"env": {"VLLMOPS_HOME": name.replace("HERE", str(place))}}


def no_home() -> None:
    for name in ("HOME", "VLLMOPS_HOME", "XDG_STATE_HOME"):
        os.environ.pop(name, None)


HOMES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "none": lambda _: {"before": no_home},
    "none, and no user": lambda _: {"before": no_home, "uid": 54321},
    "of nobody": with_home("~nosuchuser/x"),
    "a file": with_home("HERE/file"),
    "below a file": with_home("HERE/file/x"),
    "a device": with_home("/dev/null"),
    "proc": with_home("/proc/self/x"),
    "a loop": with_home("HERE/loop"),
    "a link to nothing": with_home("HERE/dangling"),
    "read-only": lambda _: {"env": {"VLLMOPS_HOME": "/usr/x"}, "uid": NOBODY},
    "not UTF-8": with_home("HERE/\udcff\udc80"),
    "escapes": with_home("HERE/" + ESCAPES.replace("\u2028", "")),
    "a line break": with_home("HERE/a\nb"),
    "blanks": with_home("HERE/ a  b "),
    "markup": with_home("HERE/[red]x[/link]"),
    "too long": with_home("/tmp/" + "x" * 300),
    "far too long": with_home("/tmp" + FAR),
    "long": with_home("HERE/" + "y" * 150),
    "~": with_home("~"),
}


@parametrize_with_numbers(HOMES, "none, and no user", "read-only")
def test_homes(
    trial: Trial, tmp_path: Path, number: int, case: Callable[[Path], dict[str, Any]]
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    how = case(tmp_path)
    if how.get("env", {}).get("VLLMOPS_HOME") == "~":
        how["env"]["HOME"] = str(tmp_path)
    for leaf in turns(LEAVES, number):
        trial.run_variants(leaf, leaf.line(), "--json", **how)
    # What changes something does it, or refuses before: to try again must not do it twice.
    for words in (["keys", "add", "--json"], ["keys", "list", "--json"]):
        trial.run(words, **how)


# Limits


def make_limit_setter(kind: int, limit: int) -> Callable[[], object]:
    return lambda: resource.setrlimit(kind, (limit, limit))


def little_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + (96 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def left_behind() -> None:
    place = tempfile.mkdtemp()
    os.chdir(place)
    os.rmdir(place)


LIMITS = {
    "10 files": make_limit_setter(resource.RLIMIT_NOFILE, 10),
    "20 files": make_limit_setter(resource.RLIMIT_NOFILE, 20),
    "files of no size": make_limit_setter(resource.RLIMIT_FSIZE, 0),
    "96 MiB of memory": little_memory,
    "no core": make_limit_setter(resource.RLIMIT_CORE, 0),
    "no directory": left_behind,
    "umask": lambda: os.umask(0o777),
}


@parametrize_with_numbers(LIMITS)
def test_limits(trial: Trial, number: int, case: Callable[[], object]) -> None:
    for leaf in turns(LEAVES, number):
        trial.run(leaf.line(), before=case)


def run_in_new_interpreter(
    before: Callable[[], object], *words: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in an interpreter of its own: what Python adds comes as it ends."""
    line = [sys.executable, "-m", "vllmops", *words]
    return subprocess.run(
        line, check=False, preexec_fn=before, capture_output=True, text=True, timeout=TIMEOUT_S * 3
    )


@pytest.mark.parametrize(
    "words",
    ["responses stats --target http://127.0.0.1:9", "responses list --target http://127.0.0.1:9"],
)
@pytest.mark.parametrize("number", [5, 6])
def test_so_few_files_that_nothing_is_imported(number: int, words: str) -> None:
    ended = run_in_new_interpreter(
        make_limit_setter(resource.RLIMIT_NOFILE, number), *words.split()
    )
    # The file that could not be opened has a long path, which may be broken into lines.
    message = " ".join(ended.stderr.split())
    hint = "hint: allow more open files: ulimit -n 1024"
    assert re.fullmatch(f"error: .*Too many open files {hint}", message)
    assert "Traceback" not in message
    assert ended.returncode == ExitCode.FAILED


@pytest.mark.parametrize("size", [48, pytest.param(64, marks=long), 80])
def test_too_little_memory(size: int) -> None:
    ended = run_in_new_interpreter(make_limit_setter(resource.RLIMIT_AS, size << 20), "ps")
    if ended.returncode == -signal.SIGABRT:  # the interpreter does not even start
        assert "Fatal Python error" in ended.stderr, ended.stderr
        return
    why = f"error: memory is limited to {size} MiB; a command needs 96 MiB"
    assert ended.stderr.replace("\n ", "").startswith(why), ended.stderr
    assert ended.returncode == ExitCode.FAILED


@pytest.mark.parametrize("size", [96, *(pytest.param(n, marks=long) for n in (128, 256)), 512])
def test_with_little_memory_a_command_takes_little(size: int) -> None:
    """Its threads would reserve more than 1 GiB of addresses."""
    for _ in range(5 if EVERYTHING else 1):
        ended = run_in_new_interpreter(make_limit_setter(resource.RLIMIT_AS, size << 20), "ps")
        assert not ended.stderr
        assert ended.returncode == ExitCode.OK


def test_a_thread_that_ends_before_it_began() -> None:
    """Python waits for ever for such a thread; only too little memory at that moment makes one."""
    code = """
import sys, threading
def bootstrap(self):
    raise MemoryError
threading.Thread._bootstrap_inner = bootstrap
sys.argv = ["vllmops", "ps"]
from vllmops import app
from vllmops.support import output
app.run_command = lambda: threading.Thread(target=print).start()
app.main()
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert ended.stderr == "error: no thread can be started: too little memory, or too many run\n"
    assert ended.returncode == ExitCode.FAILED


@pytest.mark.parametrize("error", ["MemoryError", "SystemError", "ImportError"])
def test_any_failure_without_free_memory_is_reported_as_out_of_memory(error: str) -> None:
    """A package may take an import that fails for a module that is not there.

    Where exactly Python has no memory left is up to its version and its libraries, so a limit says
    it is reached, and what would need more of it raises what Python raises then.
    """
    code = f"""
import sys
from vllmops import app
def fail(*_):
    app.read_address_space_limit = lambda: 0
    raise AttributeError("module 'httpcore' has no attribute 'AsyncConnectionPool'")
def report(_):
    raise {error}
app.build_root_command, app.report_error = fail, report
sys.argv = ["vllmops", "ps"]
app.main()
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert ended.stderr.startswith("error: there is not enough memory"), ended.stderr
    assert ended.returncode == ExitCode.FAILED


# Files


CONTENTS = {
    "empty": b"",
    "binary": bytes(range(256)) * 400,
    "brackets": b"[" * 100_000,
    "nested": b'{"a":' * 50_000,
    "cut gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03abc",
    "cut zip": b"PK\x03\x04" + b"\0" * 40,
    "null": b"null",
    "number": b"1e999",
    "a long line": b"x" * 20_000_000,
    "escapes": f'{{"{ESCAPES}": 1}}\n{ESCAPES}'.encode(),
    "nan": b'{"version": NaN, "keys": Infinity}',
    "surrogate": b'{"version": "\\ud800"}',
}
PATHS = {
    **{name: f"HERE/{name}" for name in CONTENTS},
    **{name: f"HERE/{name}" for name in ("fifo", "sparse", "loop", "socket", "missing")},
    # Links, not the devices: whoever replaces what he is given replaces ours.
    **{f"/dev/{name}": f"HERE/dev-{name}" for name in ("zero", "full", "null", "tty")},
    "directory": "HERE",
    "below a file": "HERE/empty/x",
    "no such directory": "HERE/nowhere/x",
    "no text": "",
    "not UTF-8": "HERE/\udcff",
    "escapes in the name": "HERE/\x1b[31m\u202e\x9b\n",
    "too long": "x" * 300,
    "far too long": FAR[1:],
    "a dash": "-",
    "of nobody": "~nosuchuser/x",
}


def make_files(place: Path, case: str) -> None:
    for name, content in CONTENTS.items():
        if name in case:
            (place / name).write_bytes(content)
    os.mkfifo(place / "fifo")
    with (place / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    (place / "loop").symlink_to("loop")
    for device in ("zero", "full", "null", "tty"):
        (place / f"dev-{device}").symlink_to(f"/dev/{device}")
    with socket.socket(socket.AF_UNIX) as sock:
        here = os.open(place, os.O_RDONLY)
        sock.bind(f"/proc/self/fd/{here}/socket")  # the name of a socket has to be short
        os.close(here)


@parametrize_with_numbers(PATHS)
def test_files(trial: Trial, tmp_path: Path, number: int, case: str) -> None:
    make_files(tmp_path, case)
    for leaf, param in turns(places("Path"), number):
        trial.run(leaf.line(param, case.replace("HERE", str(tmp_path))))


def test_a_file_that_is_missing_is_the_same_failure_wherever_it_is_named(
    vllmops: Any, tmp_path: Path
) -> None:
    reads = {"file", "source", "config", "compaction_prompt", "keyring", "admin_token", "core"}
    found = {param.name: (leaf, param) for leaf, param in places("Path") if param.name in reads}
    assert set(found) == reads
    missing = str(tmp_path / "missing")
    for leaf, param in found.values():
        words = leaf.line(param, missing)
        answer = vllmops(*words)
        assert answer.code == ExitCode.FAILED, (words, answer.out, answer.err)
    words = ["serve", "--demo", "text", "--dry-run"]
    for option in ("config", "compaction-prompt", "keyring", "admin-token"):
        assert vllmops(*words, f"--{option}={missing}").code == ExitCode.FAILED, option


def test_a_word_too_many_is_not_called_unexpected(vllmops: Any) -> None:
    answer = vllmops("patches", "list", "one", "\x1b[31mtwo")
    assert answer.code == ExitCode.USAGE
    assert "unexpected" not in answer.err
    assert "one" in answer.err


def test_an_error_about_a_long_text_is_short(vllmops: Any, tmp_path: Path) -> None:
    (tmp_path / "targets").write_text("[" * 400_000)
    answer = vllmops("ps", "-t", f"@{tmp_path / 'targets'}")
    assert answer.code == ExitCode.USAGE
    assert len(answer.err) < 4_000
    answer = vllmops("ps", "--json", "-t", f"@{tmp_path / 'targets'}")
    assert len(answer.out) < 4_000


@pytest.mark.root_only
def test_a_file_of_somebody_else(trial: Trial, home: Path) -> None:
    home.chmod(0o777)
    secret = home / "secret"
    secret.write_text("x")
    secret.chmod(0o600)
    for leaf, param in places("Path"):
        trial.run(leaf.line(param, str(secret)), uid=NOBODY)


# Numbers and texts

NUMBERS = (
    "nan",
    "inf",
    "-inf",
    "1e308",
    "1e999",
    "-1",
    "0",
    "",
    "x",
    "9" * 4400,
    "1_0",
    "\u0661",
    "0x10",
)
TEXTS = {
    "empty": "",
    "blank": " ",
    "100 KB": "x" * 100_000,
    "escapes": ESCAPES,
    "not UTF-8": "a\udcffb",
    "lines": "a\nb\tc",
    "markup": "[red]x[/bold][link=http://x]y",
    "format": "%s{0}{x!r}\\",
    "a dash": "-",
    "a path": "../../../../etc/passwd",
    "zero width": "a\u200b\ufeff\U000e0041b",
    "big number": "9" * 5000,
}
URLS = {
    "no host": "http://",
    "port too big": "http://h:99999",
    "port no number": "http://x:abc",
    "port below zero": "http://127.0.0.1:-1",
    "open bracket": "http://[::1",
    "no address": "http://[zz]:80",
    "control": "http://a\x1b[31m\r\nb/",
    "user": "http://u:p@127.0.0.1:1/",
    "closed port": "http://127.0.0.1:1",
    "wrong scheme": "ftp://h/x",
    "not UTF-8": "http://\udcff/",
    "long host": f"http://{'a' * 300}.example/",
    "international": "http://ex\u200bämple\u2028.invalid/",
    "percent": "http://%zz%00/",
    "slashes": "http:////",
    "redis port": "redis://h:notaport",
    "redis number": "redis://127.0.0.1:1/notanumber",
    "redis closed": "redis://127.0.0.1:1/0",
    "redis bracket": "redis://[::1",
    "postgresql bracket": "postgresql://[::1",
    "postgresql port": "postgresql://127.0.0.1:99999/x",
    "postgresql closed": "postgresql://127.0.0.1:1/x",
    "sqlite directory": "sqlite:////",
    "sqlite missing": "sqlite:////nowhere/at/all.db",
    "sqlite device": "sqlite:////dev/full",
    "memory with a path": "memory://x/y",
    "unknown": "foo",
    "a class of nobody": "no.such.Class",
    "scheme alone": "redis://",
}


@pytest.mark.parametrize(
    ("number", "value"), list(enumerate(NUMBERS)), ids=[n[:8] or "-" for n in NUMBERS]
)
def test_numbers(trial: Trial, number: int, value: str) -> None:
    for leaf, param in turns(places("Int", "Float"), number):
        trial.run(leaf.line(param, value))


@parametrize_with_numbers(TEXTS)
def test_texts(trial: Trial, number: int, case: str) -> None:
    for leaf, param in turns(places("String", "Choice"), number):
        trial.run_variants(leaf, leaf.line(param, case), "--json")


@parametrize_with_numbers(URLS)
def test_urls(trial: Trial, number: int, case: str) -> None:
    for leaf, param in turns(
        places("String", names="target store url webhook watch_webhook"), number
    ):
        trial.run_variants(leaf, leaf.line(param, case), "--json")


# A server that answers badly

ANSWERS = {
    "silence": b"",
    "nonsense": b"\x00\xff\x1b[31m\r\n\r\n",
    "escapes": b"HTTP/1.1 500 \x1b[31m\r\nContent-Length: 5\r\n\r\n\x1b[2J\xff",
    "json of another kind": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
    "brackets": b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n" + b"[" * 9000,
    "cut": b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n{",
    "unauthorised": b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n",
    "moved to itself": b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",
    "length no number": b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
    "gzip that is none": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nabc",
}


@pytest.fixture
def answering_server() -> Iterator[Callable[[bytes], str]]:
    """Starts a server that says the same to everybody; returns its URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve(answer: bytes) -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    try:
                        connection.recv(65536)
                        connection.sendall(answer)
                    except OSError:
                        continue

        def start(answer: bytes) -> str:
            threading.Thread(target=serve, args=(answer,), daemon=True).start()
            return f"http://127.0.0.1:{server.getsockname()[1]}"

        yield start
        server.shutdown(socket.SHUT_RDWR)


@parametrize_with_numbers(ANSWERS)
def test_answers(
    trial: Trial, answering_server: Callable[[bytes], str], number: int, case: bytes
) -> None:
    url = answering_server(case)
    for leaf, param in turns(places("String", names="target"), number):
        trial.run(leaf.line(param, url))


def test_every_command_has_its_turns() -> None:
    """Each command is tried with a fair share of the inputs."""
    count = len(STREAMS) + len(TERMINALS) + len(HOMES) + len(LIMITS)
    tried = itertools.chain.from_iterable(turns(LEAVES, number) for number in range(count))
    counts = {leaf.words: 0 for leaf in LEAVES}
    for leaf in tried:
        counts[leaf.words] += 1
    assert min(counts.values()) >= TURNS
