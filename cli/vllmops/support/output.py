"""The one place that prints: a result as text or as a JSON envelope, errors, hints."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, Self

import typer
from typer.core import TyperCommand

from .errors import ExitCode, VllmopsError, make_usage_error
from .numbers import CENTURY_S
from .streams import (
    ReaderGoneError,
    clean_log_text,
    escape_json,
    make_printable,
    set_interrupt_handler,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

ENVELOPE_VERSION = 1
ORDER = "vllmops.order"
PIPE_WIDTH = 200
ROOM = 72  # columns: narrower terminals fold everything
MOST_SHOWN = 1 << 64  # bytes: no machine has more
_invoked = ""
# The server that this thread works for, where there are several.
speaker: ContextVar[str] = ContextVar("speaker", default="")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON envelope on stdout.")]

P = ParamSpec("P")


class VerbatimText(str):
    """Text to print line by line as it is, never wrapped: a script, a log.

    A log's colours are left out and other controls shown as visible characters, in a pipe too:
    what comes out of `grep` or `tail` ends in a terminal. The file has the bytes themselves.
    """


class JsonText(VerbatimText):
    """JSON that somebody keeps: byte by byte in a pipe.

    In a terminal unsafe characters are escaped as JSON escapes them: the data stays the same.
    """


@dataclass(frozen=True)
class Result:
    """What a command found out: data for ``--json``, and the same for a person.

    Args:
        data: anything msgspec can encode.
        text: makes what a person sees; called only when it is shown.
        exit_code: 0, or 1 where findings reach ``--fail-on``.
        errors: of those of several servers for which the command failed.
    """

    data: Any
    text: Callable[[], Sequence[RenderableType]] = field(default=tuple)
    exit_code: ExitCode = ExitCode.OK
    errors: tuple[VllmopsError, ...] = ()


class OrderTrackingCommand(TyperCommand):
    """Keeps in ``ctx.meta[ORDER]`` which options were given, each as often as it was."""

    def make_parser(self, ctx: Any) -> Any:
        parser: Any = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_and_record_order(args: list[str]) -> tuple[Any, list[str], list[Any]]:
            values, rest, order = parse(args)
            ctx.meta[ORDER] = order
            return values, rest, order

        parser.parse_args = parse_and_record_order
        return parser


class TyperApp(typer.Typer):
    """Its commands are of class `OrderTrackingCommand`, unless they say otherwise."""

    def command(self, *names: Any, **options: Any) -> Any:
        return super().command(*names, **{"cls": OrderTrackingCommand, **options})


def make_typer_app() -> typer.Typer:
    """A Typer app for a command, or for the commands of a noun."""
    return TyperApp(
        add_completion=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def print_result(run: Callable[P, Result]) -> Callable[P, None]:
    """Make a Typer command of a function that returns a `Result` and prints nothing."""

    @functools.wraps(run)
    def run_and_print(*args: P.args, **kwargs: P.kwargs) -> None:
        set_interrupt_handler(signal.default_int_handler)
        try:
            result = run(*args, **kwargs)
        except KeyboardInterrupt as error:  # Typer would end without a word
            raise VllmopsError("interrupted", "interrupted") from error
        with suppress(ReaderGoneError):  # the exit code counts, whether all output was read or not
            if kwargs.get("json_"):
                print_envelope(result.data, result.exit_code, *result.errors)
            else:
                print_parts(*result.text())
        raise typer.Exit(result.exit_code)

    # Typer reads the parameters from the wrapped function, the return type from here.
    run_and_print.__annotations__ = {**run.__annotations__, "return": None}
    return run_and_print


def set_command_name(name: str) -> None:
    """Note the command that was typed, without options, for the envelope: ``cache inspect``."""
    global _invoked  # noqa: PLW0603
    _invoked = name


def make_console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr; a pipe gets wide lines instead of cut ones."""
    from .terminal import Terminal  # noqa: PLC0415

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Terminal(
        stderr=stderr, width=width, highlight=False, soft_wrap=False, markup=False, emoji=False
    )


def print_parts(*parts: RenderableType, stderr: bool = False) -> None:
    """Print for a person."""
    out = make_console(stderr=stderr)
    for part in parts:
        if isinstance(part, JsonText):
            as_it_is = out.encoding.startswith("utf") and not out.file.isatty()
            out.file.write(f"{part if as_it_is else escape_json(part, out.encoding)}\n")
        elif isinstance(part, VerbatimText):
            out.file.write(f"{clean_log_text(part)}\n")
        else:
            out.print(part)
    out.file.flush()


def print_to_stderr(message: str, style: str = "") -> None:
    """Print a hint or a progress line, on stderr, without markup."""
    if who := speaker.get():
        message = f"{who}: {message}"
    make_console(stderr=True).print(message, style=style)


def run_or_watch(
    make_result: Callable[[], Result], interval_s: float, *, watch: bool, as_json: bool
) -> Result:
    """The result of a look; with ``--watch`` looks repeat, and are shown, until Ctrl-C.

    Raises:
        VllmopsError: ``usage``, or as `make_result` does.
    """
    if watch and as_json:
        raise make_usage_error(
            "--watch cannot be combined with --json", "leave one of these options out"
        )
    if not watch:
        return make_result()
    with exit_on_interrupt():
        while True:
            result = make_result()
            make_console().clear()
            print_parts(*result.text())
            time.sleep(interval_s)


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """What goes on until Ctrl-C, which is its ordinary end: no error is printed."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def require_confirmation(question: str, hint: str) -> None:
    """Ask a person whether to go on.

    Args:
        question: with a question mark.
        hint: the command that does it without asking.

    Raises:
        VllmopsError: ``unconfirmed``, if the answer is no, or nobody can be asked.
    """
    if not sys.stdin.isatty():
        raise VllmopsError(
            "unconfirmed",
            f"{question} Standard input is not a terminal, so vllmops can't ask",
            hint,
            exit_code=ExitCode.USAGE,
        )
    if not typer.confirm(make_printable(question), err=True):
        raise VllmopsError("unconfirmed", "nothing was done", hint)


class Progress:
    """A live line on stderr with the elapsed time; in a pipe, a line for each new text.

    Args:
        started_at: when the work began, seconds since the epoch.
        quiet: show nothing.
    """

    def __init__(self, started_at: float, *, quiet: bool = False) -> None:
        self.started_at = started_at
        self.quiet = quiet
        self.text = ""
        self.live_display: Live | None = None
        # Lines of their own, too, once other output runs through the terminal.
        self.plain = not sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the line away; a later text brings it back."""
        self.text = ""
        if self.live_display:
            self.live_display.stop()
            self.live_display = None

    def update(self, text: str) -> None:
        """Show a text from now on."""
        if self.quiet or text == self.text or speaker.get():
            return
        self.text = text
        if self.plain:
            print_to_stderr(f"{format_duration(self.elapsed_s):>6}  {text}")
        elif self.live_display is None:
            from rich.live import Live  # noqa: PLC0415

            self.live_display = Live(
                get_renderable=self.render_line, console=make_console(stderr=True), transient=True
            )
            self.live_display.start()

    @property
    def elapsed_s(self) -> float:
        return time.time() - self.started_at

    def render_line(self) -> RenderableType:
        """The line as it is shown right now."""
        from rich.text import Text  # noqa: PLC0415

        return Text.assemble((f"{format_duration(self.elapsed_s):>6}  ", "bold"), self.text)


def make_table(
    *columns: str, right_columns: Sequence[str] = (), unfolded_columns: Sequence[str] = ()
) -> Table:
    """A table that folds long cells rather than cutting them.

    Args:
        columns: their heads.
        right_columns: the columns whose cells are on the right.
        unfolded_columns: the columns whose cells are not folded, unless the terminal is very
            narrow.
    """
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    room = bool(unfolded_columns) and make_console().width >= ROOM
    for name in columns:
        made.add_column(
            name,
            overflow="fold",
            justify="right" if name in right_columns else "left",
            no_wrap=room and name in unfolded_columns,
        )
    return made


def make_facts_table(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """A table without a head: what a thing is called, and what it is."""
    made = make_table("", "")
    made.show_header = False
    for row in rows:
        made.add_row(*row)
    return made


def style_text(text: str, style: str) -> Text:
    """Text in a style; without one, a string is enough."""
    from rich.text import Text  # noqa: PLC0415

    return Text(text, style)


@dataclass(frozen=True)
class IndentedLine:
    """One line, and how far it is indented."""

    indent: int
    text: str
    style: str = ""


@dataclass(frozen=True)
class FoldedLines:
    """Lines that keep their indentation, and all their text, where the terminal is narrow."""

    lines: tuple[IndentedLine, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        import textwrap  # noqa: PLC0415

        from rich.text import Text  # noqa: PLC0415

        for line in self.lines:
            folded = textwrap.wrap(
                line.text,
                width=max(options.max_width, 24),
                initial_indent=" " * line.indent,
                subsequent_indent=" " * (line.indent + 4),
                break_on_hyphens=False,
            )
            yield Text("\n".join(folded), style=line.style)


def build_result_fields(
    data: object, exit_code: int, errors: Sequence[VllmopsError]
) -> dict[str, Any]:
    """What the envelope says of a result."""
    return {
        "status": "error" if errors else "ok" if exit_code == ExitCode.OK else "findings",
        "exit_code": int(exit_code),
        "data": data,
        "errors": [build_error_fields(error) for error in errors],
    }


def print_envelope(data: object, exit_code: int, *errors: VllmopsError) -> None:
    """Print the JSON envelope, the only thing on stdout."""
    import msgspec  # noqa: PLC0415

    content = {
        "version": ENVELOPE_VERSION,
        "command": _invoked,
        **build_result_fields(data, exit_code, errors),
    }
    try:
        text = msgspec.json.format(msgspec.json.encode(content), indent=2).decode()
    except UnicodeEncodeError:  # a file's name that is not UTF-8, which msgspec can't write
        text = json.dumps(msgspec.to_builtins(content), indent=2)
    sys.stdout.write(escape_json(text, sys.stdout.encoding) + "\n")
    sys.stdout.flush()


def build_error_fields(error: VllmopsError) -> dict[str, str]:
    """An error as the envelope has it; ``page`` is what ``vllmops help`` takes."""
    return {
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "page": error.code,
    }


def print_error(error: VllmopsError, *, as_json: bool) -> None:
    """Tell an error: what is wrong, then what mends it."""
    if as_json:
        print_envelope(error.data, error.exit_code, error)
    else:
        print_to_stderr(f"error: {error.message}", style="bold red")
        if error.hint:
            print_to_stderr(f"  hint: {error.hint}")


def format_bytes(count: float | None) -> str:
    """Bytes for a person: ``1.5 MiB``; a dash where unknown."""
    if count is None or not abs(count) <= MOST_SHOWN:
        return "-"
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def format_duration(seconds: float | None) -> str:
    """A duration for a person: ``42s``, ``3m05s``, ``2h10m``, ``3d04h``; a dash else."""
    if seconds is None or not abs(seconds) <= CENTURY_S:
        return "-"
    total = max(int(seconds), 0)  # the clock may have been set back
    if total < 60:
        return f"{total}s"
    minutes, rest = divmod(total, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02}m"
    return f"{hours // 24}d{hours % 24:02}h"
