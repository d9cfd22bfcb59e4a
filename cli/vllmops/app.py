"""Registers the commands; a command's module is imported only when it is called.

What is imported at the top is in every interpreter already: a Ctrl-C before `main` runs is a
traceback, so there must be no time for one.
"""

from __future__ import annotations

import gc
import os
import sys

from . import __version__

EXTRA = "Got unexpected extra argument"
NO_THREAD = "can't start new thread"  # Python's RuntimeError where clone(2) fails
NO_THREAD_STARTS = "no thread can be started: too little memory, or too many run"
LEAST = 96 << 20  # bytes of address space: with less a command may end anywhere, or hang
M_ARENA_MAX = -8  # of mallopt(3)
STACK = 1 << 20  # bytes for a thread where memory is limited
SPARE = 8 << 20  # bytes: with less of its address space left, a process has too little memory
TYPE_CHECKING = False  # typing's, without the import
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from .support.errors import VllmopsError


class CommandEntry:  # not a dataclass: those cost `--version` a third of its time
    """Where a command lives.

    Args:
        module: of `commands`, or with its package; in it ``app``, or what follows a colon.
        has_subcommands: whether it is a noun with commands of its own.
    """

    def __init__(self, module: str, help: str, has_subcommands: bool = False) -> None:  # noqa: A002
        self.module = module
        self.help = help
        self.has_subcommands = has_subcommands

    def import_command(self) -> Any:
        """The click command; imports its module."""
        from importlib import import_module  # noqa: PLC0415

        import typer  # noqa: PLC0415

        module, _, attribute = self.module.partition(":")
        place = module if "." in module else f"vllmops.commands.{module}"
        return typer.main.get_command(getattr(import_module(place), attribute or "app"))


COMMANDS = {
    "serve": CommandEntry("serve", "Launch a vLLM server and supervise all its processes."),
    "ps": CommandEntry("ps", "List every vLLM server on this machine."),
    "status": CommandEntry("status", "Show one server on one screen."),
    "top": CommandEntry("top", "Show servers on a full screen that stays up to date."),
    "logs": CommandEntry("logs", "Show a server's log, also after it has ended."),
    "wait": CommandEntry("wait", "Wait until a server is ready or has stopped."),
    "stop": CommandEntry("stop:stop_app", "Drain a server, then stop it."),
    "restart": CommandEntry(
        "stop:restart_app", "Stop a server and start it again with the same command."
    ),
    "drain": CommandEntry(
        "drain:drain_app", "Refuse new requests, and let those in flight finish."
    ),
    "resume": CommandEntry("drain:resume_app", "Have a drained server take requests again."),
    "probe": CommandEntry("probe", "Say whether a server lives, is ready, or has started."),
    "doctor": CommandEntry("doctor", "Show what is wrong with a server, and what to do next."),
    "heal": CommandEntry("heal", "Bring a server that hangs back, without a restart."),
    "bundle": CommandEntry("bundle", "Write evidence for a bug report to a file, without secrets."),
    "watch": CommandEntry("watch", "Report when a server stalls, and keep the evidence."),
    "metrics": CommandEntry("metrics", "Show a server's state as metrics of Prometheus."),
    "attach": CommandEntry("attach", "Load the agent into a server that runs without it."),
    "cache": CommandEntry("cache", "Multimodal and encoder caches.", has_subcommands=True),
    "patches": CommandEntry(
        "patches", "Known vLLM defects and their patch status.", has_subcommands=True
    ),
    "memory": CommandEntry(
        "memory", "Memory of a server's processes over time.", has_subcommands=True
    ),
    "stacks": CommandEntry("stacks", "Stacks of every process of a server.", has_subcommands=True),
    "requests": CommandEntry("requests", "Requests that a server works on.", has_subcommands=True),
    "responses": CommandEntry(
        "vllmops_responses.commands.responses", "Stored responses.", has_subcommands=True
    ),
    "conversations": CommandEntry(
        "vllmops_responses.commands.conversations", "Stored conversations.", has_subcommands=True
    ),
    "integrate": CommandEntry(
        "integrate", "What systemd and Kubernetes need.", has_subcommands=True
    ),
    "keygen": CommandEntry("vllmops_responses.commands.keygen", "Print a fresh random key."),
    "keys": CommandEntry(
        "vllmops_responses.commands.keys",
        "Keys that protect client-held conversation state.",
        has_subcommands=True,
    ),
    "help": CommandEntry("help", "Show a page of the manual."),
    "completions": CommandEntry("completions", "Print a shell's completion script."),
}


def build_root_command() -> Any:
    """The click command behind ``vllmops``; imports Typer, and no command."""
    import typer  # noqa: PLC0415
    from typer.core import TyperCommand, TyperGroup  # noqa: PLC0415

    class LazyGroup(TyperGroup):
        def __init__(self, **how: Any) -> None:
            super().__init__(**how)
            self.commands = {
                name: TyperCommand(name, help=entry.help, callback=lambda: None)
                for name, entry in COMMANDS.items()
            }

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, command, rest = super().resolve_command(ctx, args)
            if name is None:
                return name, command, rest
            command = COMMANDS[name].import_command()
            if COMMANDS[name].has_subcommands:
                command.help, command.no_args_is_help = COMMANDS[name].help, True
            gc.freeze()
            gc.enable()
            return name, command, rest

    app = typer.Typer(
        name="vllmops",
        cls=LazyGroup,
        help="Operate vLLM servers: launch, supervise, inspect, diagnose, repair.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # Rich's help takes longer to import than all the rest
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def handle_root_options(
        version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    ) -> None:
        if version:
            print_version()
            raise typer.Exit

    if "_VLLMOPS_COMPLETE" in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]  # noqa: PLC0415

        completion_init()
    return typer.main.get_command(app)


def print_version() -> None:
    """Print the version, and on stderr whether another program has our name."""
    from .collect.machine.name_collision import describe_namesakes  # noqa: PLC0415

    print(f"vllmops {__version__}")
    if line := describe_namesakes():
        print(line, file=sys.stderr)


def main() -> None:
    """Run ``vllmops``: exit codes as in `errors.ExitCode`, a traceback only on request."""
    try:
        from .support import streams  # noqa: PLC0415

        streams.set_interrupt_handler(exit_interrupted)
        streams.prepare_streams()
        if os.environ.get("VLLMOPS_DEBUG") != "1":
            # What Python says as it ends, for example of an event loop that could not be made.
            sys.unraisablehook = handle_unraisable
            if not sys.warnoptions:
                import warnings  # noqa: PLC0415

                warnings.simplefilter("ignore")
        gc.disable()  # imports make no garbage, and collecting it took 6 % of `stacks dump`
        code = run_command()
        if error := streams.close_output():
            code = report_error(make_output_error(error))
        # From here on a Ctrl-C would be a traceback from the end of the interpreter.
        streams.set_interrupt_handler(streams.DEFAULT)
    except KeyboardInterrupt:
        exit_interrupted()
    sys.exit(code)


def handle_unraisable(unraisable: Any) -> None:
    """Write nothing of an exception that nobody can catch: a command reports its own errors.

    A thread that fails before its own code runs is the exception: whoever starts it waits for ever.
    """
    if getattr(unraisable.object, "__name__", "") == "_bootstrap":
        os.write(2, f"error: {NO_THREAD_STARTS}\n".encode())
        os._exit(1)


def exit_interrupted(*_: object) -> NoReturn:
    """End at Ctrl-C, before a command runs: an exception in the middle of an import shows."""
    try:
        from .support.errors import VllmopsError  # noqa: PLC0415

        report_error(VllmopsError("interrupted", "interrupted"))
    except BaseException:  # a half-imported module can't report it
        os.write(2, b"error: interrupted\n")
    finally:
        os._exit(130)


def run_command() -> int:
    """Run the command in ``sys.argv``; returns the exit code."""
    if sys.argv[1:] == ["--version"]:
        print_version()
        return 0
    if (code := run_quick_probe()) is not None:
        return code
    import typer  # noqa: PLC0415

    from .support.errors import ExitCode, VllmopsError  # noqa: PLC0415
    from .support.output import set_command_name  # noqa: PLC0415
    from .support.streams import OutputError, ReaderGoneError  # noqa: PLC0415

    set_command_name(parse_command_name())
    try:
        adapt_to_memory_limit()
        return build_root_command().main(prog_name="vllmops", standalone_mode=False) or ExitCode.OK
    except typer.TyperException as error:
        failure = convert_usage_error(error)
        if failure is None:
            return error.exit_code
    except VllmopsError as error:
        failure = error
    except (KeyboardInterrupt, typer.Abort):
        failure = VllmopsError("interrupted", "interrupted")
    except ReaderGoneError:  # the reader has what it needs
        return ExitCode.OK
    except OutputError as error:
        failure = make_output_error(error)
    except (OSError, MemoryError) as error:
        failure = make_system_error(error)
    except Exception as error:
        failure = make_internal_error(error)
    if os.environ.get("VLLMOPS_DEBUG") == "1":
        raise failure
    try:
        return report_error(failure)
    # Without memory the imports of the error report fail, in Python itself with a SystemError.
    except (ImportError, MemoryError, OSError, SystemError):
        os.write(2, f"error: {failure.message}\n  hint: {failure.hint}\n".encode())
        return failure.exit_code


def run_quick_probe() -> int | None:
    """Answer a probe without Typer; returns the exit code, None where it takes the command."""
    if sys.argv[1:2] != ["probe"]:
        return None
    from .servers.quick_probe import answer_probe  # noqa: PLC0415

    try:
        return answer_probe(sys.argv[2:])
    except Exception:  # the command says what is wrong
        return None


def convert_usage_error(error: Any) -> VllmopsError | None:
    """Typer's error about a command line, as a VllmopsError; None if it showed help."""
    from .support.errors import ExitCode, VllmopsError  # noqa: PLC0415

    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # Typer keeps the class to itself, too
        error.show()
        return None
    # The parser of options has no context.
    hint = f"{context.command_path if context else f'vllmops {parse_command_name()}'} --help"
    unknown = hasattr(error, "possibilities")  # an option
    if unknown and context and context.info_name == "serve":
        hint += "; arguments for vLLM come after --: vllmops serve MODEL -- VLLM ARGUMENTS"
    message = error.format_message()
    if message.startswith(EXTRA):  # nothing here is unexpected, it is one word too many
        message = f"too many arguments: {message.rpartition(' (')[2][:-1]}"
    return VllmopsError("usage", message, hint, exit_code=ExitCode(error.exit_code))


def read_address_space_limit() -> int | None:
    """The bytes of address space that this process may have; None where there is no limit."""
    try:
        import resource  # noqa: PLC0415
    except ImportError:  # on Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def adapt_to_memory_limit() -> None:
    """Take little address space where it is limited.

    Otherwise each thread reserves 64 MiB for what it allocates, and 8 MiB for its stack. Once
    nothing is left, whoever starts a thread waits for ever: it ends before its Python begins.

    Raises:
        VllmopsError: ``system.refused`` where the limit is too low.
    """
    limit = read_address_space_limit()
    if limit is None:
        return
    if limit < LEAST:
        from .support.errors import VllmopsError  # noqa: PLC0415

        raise VllmopsError(
            "system.refused",
            f"memory is limited to {limit >> 20} MiB; a command needs {LEAST >> 20} MiB",
            "ulimit -v unlimited",
        )
    import contextlib  # noqa: PLC0415
    import ctypes  # noqa: PLC0415
    import threading  # noqa: PLC0415

    threading.stack_size(STACK)
    with contextlib.suppress(AttributeError, OSError):  # another C library than GNU's
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def is_memory_exhausted() -> bool:
    """Whether this process has reached the limit of its memory.

    Then packages fail in any way: they take an import that fails for a module that is not there.
    """
    limit = read_address_space_limit()
    try:
        with open("/proc/self/statm", "rb") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return False
    return limit is not None and used > limit - SPARE


def make_internal_error(error: Exception) -> VllmopsError:
    """The error for what no command foresees."""
    from .support.errors import VllmopsError  # noqa: PLC0415

    if str(error) == NO_THREAD:
        return make_system_error(error)
    if is_memory_exhausted():
        return make_system_error(MemoryError())
    failure = VllmopsError(
        "internal",
        f"unexpected {type(error).__name__}: {error}",
        "run it again with VLLMOPS_DEBUG=1 for the traceback",
    )
    failure.__cause__ = error
    return failure


def make_system_error(error: Exception) -> VllmopsError:
    """The error for what the operating system refused, with the file and the reason.

    Args:
        error: an OSError, a MemoryError, or Python's RuntimeError for a thread.
    """
    import errno  # noqa: PLC0415

    from .support.errors import ExitCode, VllmopsError  # noqa: PLC0415

    if isinstance(error, MemoryError):
        what, code = "there is not enough memory", ExitCode.FAILED
    elif not isinstance(error, OSError):
        what, code = NO_THREAD_STARTS, ExitCode.FAILED
    else:
        name = error.filename
        named = os.fsdecode(name) if isinstance(name, (str, bytes)) else ""
        what = ": ".join(filter(None, (named, error.strerror or str(error))))
        if isinstance(error, FileNotFoundError) and not named:  # getcwd(3) names nothing
            what = "the current directory does not exist any more"
        code = ExitCode.NOT_AUTHORISED if isinstance(error, PermissionError) else ExitCode.FAILED
    hint = "run it again with VLLMOPS_DEBUG=1 to see where it happens"
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        hint = "allow more open files: ulimit -n 1024"
    failure = VllmopsError("system.refused", what, hint, exit_code=code)
    failure.__cause__ = error
    return failure


def make_output_error(error: OSError) -> VllmopsError:
    """Close standard output after an error; returns the error to report."""
    from .support import streams  # noqa: PLC0415
    from .support.errors import VllmopsError  # noqa: PLC0415

    streams.close_output()
    return VllmopsError(
        "output.failed",
        f"standard output: {error.strerror or error}",
        "write it to another place; the changes that the command made are done",
    )


def report_error(failure: VllmopsError) -> int:
    """Report an error; returns the exit code."""
    from .support import streams  # noqa: PLC0415
    from .support.output import print_error, set_command_name  # noqa: PLC0415

    set_command_name(parse_command_name())
    try:
        print_error(failure, as_json=wants_json() and failure.code != "output.failed")
    except streams.ReaderGoneError:
        pass
    except streams.OutputError as error:
        for problem in (failure, make_output_error(error)):
            print_error(problem, as_json=False)
    return failure.exit_code


def parse_command_name() -> str:
    """The command that was typed, without options: ``ps``, ``cache inspect``."""
    words = [word for word in sys.argv[1:] if not word.startswith("-")][:2]
    noun = COMMANDS.get(words[0]) if words else None
    return " ".join(words if noun and noun.has_subcommands else words[:1])


def wants_json() -> bool:
    """Whether ``--json`` was typed, also where the command line is otherwise wrong."""
    words = sys.argv[1:]
    return "--json" in (words[: words.index("--")] if "--" in words else words)
