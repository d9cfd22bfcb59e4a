"""``vllmops completions``: scripts that complete commands, options and instance names."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from ..support.output import Json, Result, VerbatimText, make_typer_app, print_result

app = make_typer_app()


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command(
    epilog="Example: vllmops completions bash > ~/.local/share/bash-completion/completions/vllmops"
)
@print_result
def completions(
    shell: Annotated[Shell, typer.Argument(help="The shell to complete in.")],
    json_: Json = False,
) -> Result:
    """Print a shell's completion script.

    The script also completes instance names.
    """
    script = get_completion_script(
        prog_name="vllmops", complete_var="_VLLMOPS_COMPLETE", shell=shell
    )
    return Result({"shell": shell, "script": script}, lambda: [VerbatimText(script.rstrip())])
