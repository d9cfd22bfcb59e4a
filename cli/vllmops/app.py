"""Registers the commands; a command's module is imported only when it is called."""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from typing import Any, NamedTuple

from . import __version__


class Entry(NamedTuple):  # not a dataclass: those cost `--version` a third of its time
    """Where a command lives: a module of `commands`, and in it ``app`` or what follows a colon.

    Args:
        several: whether it is a noun with commands of its own.
    """

    module: str
    help: str
    several: bool = False


COMMANDS = {
    "serve": Entry("serve", "Launch a vLLM server and keep hold of all its processes."),
    "ps": Entry("ps", "List every vLLM server of this machine."),
    "status": Entry("status", "One screen on one server."),
    "logs": Entry("logs", "Show a server's log."),
    "wait": Entry("wait", "Wait until a server is ready or stopped."),
    "stop": Entry("stop:stop_app", "Drain a server, then stop it."),
    "restart": Entry("stop:restart_app", "Stop a server and start it again as it was."),
    "doctor": Entry("doctor", "Say what is wrong with a server, and what to do next."),
    "bundle": Entry("bundle", "Put what a bug report needs into one file, without secrets."),
    "watch": Entry("watch", "Tell when a server stalls, with the evidence at hand."),
    "attach": Entry("attach", "Load the agent into a server that runs without it."),
    "cache": Entry("cache", "Multimodal and encoder caches.", several=True),
    "patches": Entry("patches", "Defects of vLLM's, and what became of them.", several=True),
    "memory": Entry("memory", "Memory of a server's processes over time.", several=True),
    "stacks": Entry("stacks", "Stacks of every process of a server.", several=True),
    "responses": Entry("responses", "Stored responses.", several=True),
    "keygen": Entry("keygen", "Print a fresh key."),
    "keys": Entry("keys", "The keys that seal what clients carry.", several=True),
    "completions": Entry("completions", "Print a shell's completion script."),
}


def build() -> Any:
    """The click command behind ``vllmops``; imports Typer, and no command."""
    import typer  # noqa: PLC0415
    from typer.core import TyperCommand, TyperGroup  # noqa: PLC0415

    class LazyGroup(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
            return list(COMMANDS)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
            entry = COMMANDS.get(cmd_name)
            return entry and TyperCommand(cmd_name, help=entry.help, callback=lambda: None)

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, command, rest = super().resolve_command(ctx, args)
            if name is None:
                return name, command, rest
            module, _, attribute = COMMANDS[name].module.partition(":")
            app = getattr(import_module(f"vllmops.commands.{module}"), attribute or "app")
            command = typer.main.get_command(app)
            gc.freeze()
            gc.enable()
            return name, command, rest

    app = typer.Typer(
        name="vllmops",
        cls=LazyGroup,
        help="Operate vLLM servers: launch and hold them, look inside, diagnose, repair.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # Rich's help takes longer to import than all the rest
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    ) -> None:
        if version:
            tell_version()
            raise typer.Exit

    if "_VLLMOPS_COMPLETE" in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]  # noqa: PLC0415

        completion_init()
    return typer.main.get_command(app)


def tell_version() -> None:
    """Print the version, and on stderr whether another program has our name."""
    from .namesake import warning  # noqa: PLC0415

    print(f"vllmops {__version__}")
    if line := warning():
        print(line, file=sys.stderr)


def main() -> None:
    """Run ``vllmops``: exit codes as in `errors.Exit`, a traceback only on request."""
    if sys.argv[1:] == ["--version"]:
        tell_version()
        return
    gc.disable()  # to import makes no garbage, and to look for it was 6 % of `stacks dump`
    sys.exit(run())


def run() -> int:
    """Run the command in ``sys.argv``; returns the exit code."""
    import typer  # noqa: PLC0415

    from .errors import Exit, VllmopsError  # noqa: PLC0415

    try:
        return build().main(prog_name="vllmops", standalone_mode=False) or Exit.OK
    except typer.TyperException as error:
        if error.exit_code != Exit.USAGE or not wants_json():
            error.show()  # type: ignore[attr-defined]  # ClickException has it, its base not
            return error.exit_code
        context = getattr(error, "ctx", None)
        mend = f"{context.command_path} --help" if context else ""
        failure = VllmopsError("usage", error.format_message(), mend, exit_code=Exit.USAGE)
    except VllmopsError as error:
        failure = error
    except (KeyboardInterrupt, typer.Abort):
        failure = VllmopsError("interrupted", "interrupted", exit_code=Exit.INTERRUPTED)
    except BrokenPipeError:
        # The reader of a pipe has gone; nothing is left to tell it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED
    except Exception as error:
        failure = VllmopsError(
            "internal",
            f"unexpected {type(error).__name__}: {error}",
            "run it again with VLLMOPS_DEBUG=1 for the traceback",
        )
        failure.__cause__ = error
    if os.environ.get("VLLMOPS_DEBUG") == "1":
        raise failure
    from .output import fail  # noqa: PLC0415

    fail(failure, as_json=wants_json())
    return failure.exit_code


def wants_json() -> bool:
    """Whether ``--json`` was typed, also where the command line is otherwise wrong."""
    words = sys.argv[1:]
    return "--json" in (words[: words.index("--")] if "--" in words else words)
