"""``vllmops patches list``: the state of each patch in each process."""

from __future__ import annotations

from typing import Annotated

import typer

from ...support.errors import make_usage_error
from ...support.output import Json, Result
from ..multi_target import run_per_target
from ..options import Target
from . import version_table
from .patch_states import build_patches_data, fetch_patches, render_patches

Versions = Annotated[
    bool, typer.Option("--versions", help="Show what works with which version of vLLM, as tested.")
]


@run_per_target
def list_patches(
    *, target: Target = None, versions: Versions = False, json_: Json = False
) -> Result:
    """Show the state of each patch in each process.

    With --target it asks a running server. Without it checks the vLLM in
    this environment, and starts no server. A patch is `fixed upstream`,
    `applied`, `failed` (with the reason) or `off`. A process that has not
    loaded the patched code is left out. What else does not fit this vLLM
    is listed below the table.
    """
    if versions:
        if target is not None:
            raise make_usage_error(
                "--versions shows what was tested, not a server", "vllmops patches list --versions"
            )
        return Result(version_table.build_versions_data(), version_table.render_versions)
    processes, silent = fetch_patches(target, verify=False, quiet=json_)
    return Result(build_patches_data(processes, silent), lambda: render_patches(processes, silent))
