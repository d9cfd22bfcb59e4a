"""Options that stand in the help of every command."""

from collections.abc import Iterator
from typing import Any

import pytest

from vllmops.app import COMMANDS

MANY = 8


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The commands of a tree, each with its full name."""
    for child, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{name} {child}")
    if not hasattr(command, "commands"):
        yield name, command


def list_crowded_commands() -> Iterator[Any]:
    """Every command with many visible options, and these options."""
    for noun, entry in COMMANDS.items():
        for name, command in commands(entry.import_command(), noun):
            options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
            if len(options) > MANY:
                yield pytest.param(options, id=name)


@pytest.mark.parametrize("options", list(list_crowded_commands()))
def test_the_help_of_a_command_with_many_options_has_panels(options: list[Any]) -> None:
    panels: dict[str | None, int] = {}
    for option in options:
        panels[option.rich_help_panel] = panels.get(option.rich_help_panel, 0) + 1
    assert len(panels) > 1
    assert max(panels.values()) <= MANY, "one panel has too many options"
