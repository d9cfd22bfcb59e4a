"""Options that several commands share, and their completion."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ..model.environment import ADMIN_TOKEN_FILE
from ..model.targets import parse_target
from ..support.errors import VllmopsError, make_usage_error
from ..support.files import STDIN
from ..support.numbers import (
    CENTURY_S,
    DAY_S,
    LONGEST_WAIT_S,
    MOST,
    parse_number,
    parse_whole_number,
)
from ..support.output import ORDER

T = TypeVar("T")
Named = TypeVar("Named", str | None, list[str] | None)

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
SIZES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
TINIEST_S = 0.001
YEAR_S = 366 * DAY_S
MOST_COUNTED = 1_000_000_000


def make_seconds_parser(
    minimum: float = 0.0, maximum: float = LONGEST_WAIT_S
) -> Callable[[object], float]:
    """A parser for an option in seconds: finite, and not longer than a process can wait."""

    def parse_seconds(value: object) -> float:
        return translate_parse_errors(lambda: parse_number(str(value), minimum, maximum))

    parse_seconds.__name__ = "seconds"  # what --help calls the value
    return parse_seconds


def make_count_parser(minimum: int = 1, maximum: int = MOST_COUNTED) -> Callable[[object], int]:
    """A parser for an option that is a whole number."""

    def parse_count(value: object) -> int:
        return translate_parse_errors(lambda: parse_whole_number(str(value), minimum, maximum))

    parse_count.__name__ = "n"
    return parse_count


def validate_duration(value: object) -> str:
    """A parser for an option that `parse_duration` reads later on."""
    translate_parse_errors(lambda: parse_duration(str(value)))
    return str(value)


def normalize_host_port(value: object) -> str:
    """A parser for ``[HOST:]PORT``, where to listen; the host is 127.0.0.1 if none is given."""
    return translate_parse_errors(lambda: "{}:{}".format(*parse_host_port(str(value))))


normalize_host_port.__name__ = "[host:]port"


def parse_host_port(text: str) -> tuple[str, int]:
    """Host and port of ``[HOST:]PORT``; an IPv6 address needs no brackets.

    Raises:
        ValueError: the port is none, or the host can have no address.
    """
    host, _, port = text.rpartition(":")
    try:
        host.encode("idna")  # as a socket does
    except UnicodeError as error:
        raise ValueError(f"{host!r} is not a host name") from error
    return host.strip("[]") or "127.0.0.1", parse_whole_number(port, 1, 65535)


def parse_size(value: object) -> int:
    """A parser for bytes: ``500K``, ``2M``, ``1G``, or plain."""
    text = str(value)
    scale = SIZES.get(text[-1:].upper(), 1)
    try:
        return int(parse_number(text if scale == 1 else text[:-1], 0, MOST / scale) * scale)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a size; write it as 500K, 2M or 1G.") from error


def translate_parse_errors(parse: Callable[[], T]) -> T:
    """Call a parser; its error becomes one of Typer, which names the option."""
    try:
        return parse()
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from error
    except VllmopsError as error:
        raise typer.BadParameter(f"{error.message}; {error.hint}.") from error


def parse_duration(text: str) -> float:
    """Seconds of a duration such as ``90``, ``15m``, ``36h`` or ``30d``.

    Raises:
        VllmopsError: ``usage``.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text)
    length = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not TINIEST_S <= length <= CENTURY_S:
        raise make_usage_error(
            f"{text!r} is not a duration", "write it as 15m, 36h or 30d, up to 36500d"
        )
    return length


def validate_output_path(path: Path | None) -> Path | None:
    """A callback for an option that names a file to write; ``-`` is refused."""
    if path is not None and str(path) == STDIN:
        raise typer.BadParameter("give the name of a file: - is not one.")
    return path


def complete_running_instance(incomplete: str) -> list[str]:
    """Names of the instances that run, for completion."""
    from ..servers.record import InstanceFolder  # noqa: PLC0415

    return [name for name in complete_instance(incomplete) if InstanceFolder(name).is_supervised()]


def complete_instance(incomplete: str) -> list[str]:
    """Names of all instances, including those that have ended, for completion."""
    from ..servers.record import list_instance_folders  # noqa: PLC0415

    with suppress(VllmopsError):  # a completion prints no errors
        return [f.name for f in list_instance_folders() if f.name.startswith(incomplete)]
    return []


def complete_patch_id(incomplete: str) -> list[str]:
    """Ids of the patches, for completion."""
    from ..agent.patches.registry import PATCHES  # noqa: PLC0415

    return [name for name in PATCHES if name.startswith(incomplete)]


Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")
]


def is_on_command_line(ctx: typer.Context, name: str) -> bool:
    """Whether a parameter stands on the command line, and is not from elsewhere."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def validate_target(ctx: typer.Context, param: typer.CallbackParam, target: Named) -> Named:
    """Check a target that was typed, or several; one from the environment may not be needed."""
    if target is not None and param.name and is_on_command_line(ctx, param.name):
        if isinstance(target, str) and param.param_type_name == "option":
            require_single_target(ctx, param, target)
        for word in [target] if isinstance(target, str) else target:
            if isinstance(target, str) or not word.startswith("@"):
                parse_target(word)
    return target


def require_single_target(ctx: typer.Context, param: typer.CallbackParam, target: str) -> None:
    """Refuse several targets where one is taken: of options, the last one would win unnoticed."""
    if ctx.meta[ORDER].count(param) > 1 or target.startswith("@"):
        raise make_usage_error(
            f"{ctx.info_name} works with one server, not with several", "use one --target"
        )


HELP = "Instance name, pid or URL of a server; not needed if only one runs."

Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        envvar="VLLMOPS_TARGET",
        help=HELP,
        autocompletion=complete_running_instance,
        callback=validate_target,
    ),
]
# Of a command that, without one, shows all servers of this machine.
AnyTarget = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        help="Show this server alone: instance name, pid or URL.",
        autocompletion=complete_running_instance,
        callback=validate_target,
    ),
]
# Without an environment variable: an argument would win over --target.
TargetArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[TARGET]", help=HELP, autocompletion=complete_instance, callback=validate_target
    ),
]


def make_admin_token_option(panel: str | None = None) -> Any:
    """The option ``--admin-token``, in a panel of the help."""
    return typer.Option(
        "--admin-token",
        readable=False,
        metavar="FILE",
        envvar=ADMIN_TOKEN_FILE,
        show_envvar=False,  # its name is too long for a narrow terminal
        help="File with the admin token, as keygen writes it. Whoever has the token can look into"
        " the server, repair it and change its keys remotely.",
        rich_help_panel=panel,
    )


AdminToken = Annotated[Path | None, make_admin_token_option()]
