"""The TOML file of ``vllmops serve --config``: the options of `serve` and the arguments of vLLM."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from ..collect.machine.server_address import find_option
from ..support import files
from .options import is_on_command_line

MAX_BYTES = 1 << 20
ENV = "env"
ARGUMENTS = "vllm-arguments"
# Options that say what this command does, not how the server is.
NOT_IN_A_FILE = {"config", "dry_run", "toml", "json_"}
META = "vllmops.serve-config"
TYPES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "a table",
}


@dataclass(frozen=True)
class ServeConfig:
    """What a file has beside options.

    Args:
        env: environment variables for vLLM, as ``K=V``.
        arguments: of vLLM.
    """

    env: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


def load_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """The callback of ``--config``: the options of the file become the defaults of the others.

    Raises:
        VllmopsError: ``file.unreadable`` or ``file.too-large``.
        typer.BadParameter: it is no TOML, a key is unknown, or a value has the wrong type.
    """
    if path is None or ctx.resilient_parsing:
        return path
    content = files.read_input(path, MAX_BYTES)
    try:
        table = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{path} is not TOML: {error}.") from error
    try:
        env = tuple(parse_variables(table.pop(ENV, {})))
        arguments = tuple(validate_strings(ARGUMENTS, table.pop(ARGUMENTS, [])))
        ctx.default_map = dict(parse_options(ctx, table))
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{path}: {error.message}") from error
    ctx.meta[META] = ServeConfig(env, arguments)
    return path


def get_config(ctx: typer.Context) -> ServeConfig:
    """What the file of this command line has beside options; nothing without a file."""
    config: ServeConfig = ctx.meta.get(META, ServeConfig())
    return config


def parse_options(ctx: typer.Context, table: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """The parameters that the keys of a file stand for, with their values."""
    known = list_parameters(ctx)
    for key, value in table.items():
        if key not in known:
            close = difflib.get_close_matches(key, [*known, ENV, ARGUMENTS], 1)
            meant = f"; did you mean {close[0]!r}?" if close else "."
            raise typer.BadParameter(f"unknown key {key!r}{meant}")
        parameter = known[key]
        if parameter.multiple:
            value = validate_strings(key, value)  # noqa: PLW2901
        else:
            validate_value(key, value, find_expected_type(parameter))
        try:
            parameter.type_cast_value(ctx, value)
        except typer.BadParameter as error:
            raise typer.BadParameter(f"{key}: {error.message}") from error
        yield parameter.name, value


def list_parameters(ctx: typer.Context) -> dict[str, Any]:
    """The parameters of `serve` by their keys: the long name without its dashes."""
    return {
        max(parameter.opts, key=len).lstrip("-"): parameter
        for parameter in ctx.command.params
        if parameter.name not in {*NOT_IN_A_FILE, ENV}
    }


def find_expected_type(parameter: Any) -> type:
    """The type that TOML gives the value of a parameter that takes one."""
    if getattr(parameter, "is_flag", False):
        return bool
    return (
        int if parameter.type.name == "n" else str
    )  # as `options.make_count_parser` calls its parser


def validate_value(key: str, value: object, kind: type = str) -> None:
    """Check one value.

    Raises:
        typer.BadParameter: it has another type, or a character that no command line can hold.
    """
    if type(value) is not kind:
        other = TYPES.get(type(value), "a date or time")
        raise typer.BadParameter(f"{key} must be {TYPES[kind]}, not {other}.")
    if isinstance(value, str) and "\0" in value:
        raise typer.BadParameter(f"{key} must not contain a NUL character.")


def validate_strings(key: str, value: object) -> list[str]:
    """A value that is an array of strings; raises as `validate_value`."""
    validate_value(key, value, list)
    assert isinstance(value, list)
    for index, item in enumerate(value):
        validate_value(f"{key}[{index}]", item)
    return value


def parse_variables(value: object) -> Iterator[str]:
    """A table of environment variables, each as ``K=V``; raises as `validate_value`."""
    validate_value(ENV, value, dict)
    assert isinstance(value, dict)
    for name, content in value.items():
        validate_value(f"{ENV}.{name}", content)
        if not name or "=" in name or "\0" in name:
            raise typer.BadParameter(f"{ENV}: {name!r} can't be the name of a variable.")
        yield f"{name}={content}"


def drop_overridden_keys(ctx: typer.Context, vllm_arguments: Sequence[str]) -> None:
    """Drop keys of the file that the command line sets under another name.

    Args:
        ctx: of a command line that is parsed.
        vllm_arguments: the arguments of vLLM on the command line.
    """
    model = is_on_command_line(ctx, "model")
    if model != is_on_command_line(ctx, "demo"):
        ctx.params["demo" if model else "model"] = None
    config = get_config(ctx)
    for name in ("host", "port"):
        if is_on_command_line(ctx, name) or find_option(vllm_arguments, f"--{name}"):
            config = replace(config, arguments=remove_option(config.arguments, f"--{name}"))
        if not is_on_command_line(ctx, name) and find_option(vllm_arguments, f"--{name}"):
            ctx.params[name] = None
    ctx.meta[META] = config


def remove_option(arguments: Sequence[str], name: str) -> tuple[str, ...]:
    """Arguments without ``NAME VALUE`` and ``NAME=VALUE``."""
    kept: list[str] = []
    skip = False
    for word in arguments:
        if not skip and word != name and not word.startswith(f"{name}="):
            kept.append(word)
        skip = word == name and not skip
    return tuple(kept)


def format_config(ctx: typer.Context, env: Sequence[str], arguments: Sequence[str]) -> str:
    """A file that makes ``serve --config`` do what this command line does, without secrets.

    Args:
        ctx: of the command line.
        env: environment variables that the person gave, as ``K=V``.
        arguments: of vLLM that the person gave.
    """
    from ..redaction.redactor import Redactor  # noqa: PLC0415 - few commands need it

    hidden = Redactor()
    lines = ["# For vllmops serve --config FILE"]

    def add_line(key: str, value: object, name: str, redacted_value: object) -> None:
        secret = redacted_value != value
        lines.append(
            f"# {name} is left out: it contains a secret."
            if secret
            else f"{key} = {format_toml(value)}"
        )

    for key, parameter in list_parameters(ctx).items():
        value = ctx.params.get(parameter.name)
        if not value:  # every option that is not given
            continue
        if isinstance(value, Path) or key == "admin-token":
            value = str(value)  # where a secret is, not the secret
            add_line(key, value, key, value)
        elif isinstance(value, str):
            add_line(key, str(value), key, hidden.redact_command_line([f"--{key}", value])[-1])
        else:
            add_line(key, value, key, value)
    kept, secrets = remove_secrets(arguments, hidden.redact_command_line(arguments))
    lines += [f"# {ARGUMENTS}: {name} is left out: it contains a secret." for name in secrets]
    if kept:
        lines.append(f"{ARGUMENTS} = {format_toml(kept)}")
    values = dict(pair.split("=", 1) for pair in env)
    if values:
        lines += ["", f"[{ENV}]"]
        shown = hidden.redact_secret_variables(values)
        for name, value in values.items():
            add_line(format_toml_string(name), value, name, shown[name])
    return "\n".join(lines)


def remove_secrets(
    arguments: Sequence[str], redacted_arguments: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Arguments without those that hold secrets, and the names of these.

    Args:
        arguments: as they are.
        redacted_arguments: the same, redacted.
    """
    kept: list[str] = []
    secrets: list[str] = []
    name = ""
    for word, redacted in zip(arguments, redacted_arguments, strict=True):
        if word.startswith("-"):
            name = word.partition("=")[0]
        if word == redacted:
            kept.append(word)
            continue
        if kept and kept[-1] == name:  # an option whose value is left out
            kept.pop()
        if name not in secrets:
            secrets.append(name or "an argument")
    return kept, secrets


def format_toml(value: object) -> str:
    """A boolean, a number, a string or an array of them as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return format_toml_string(value)
    if isinstance(value, Sequence):
        return f"[{', '.join(map(format_toml, value))}]"
    return str(value)


def format_toml_string(text: str) -> str:
    """A string of TOML: JSON's, but that other characters that do not print are escaped, too."""
    written = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08X}" for char in written)
