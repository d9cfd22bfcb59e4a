"""The code that ``vllmops attach`` runs inside a vLLM process, in a new thread.

It runs as a file, because this package need not be on the process's path. Its globals contain
``options``.
"""

from __future__ import annotations

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TypedDict


class BootOptions(TypedDict):
    """How to start the agent.

    Args:
        package: the folder of this package.
        home: the state directory.
        patch: whether to apply patches too.
        error_file: the file that gets the error, if any.
    """

    package: str
    home: str
    patch: bool
    error_file: str


def boot_agent(options: BootOptions) -> None:
    """Start the agent in this process; never raises."""
    try:
        import_package(Path(options["package"]))
        from vllmops.agent import attach_start  # noqa: PLC0415

        os.environ.setdefault("VLLMOPS_HOME", options["home"])
        attach_start.attach_agent(patch=options["patch"])
    except Exception as error:
        # By a rename: the command line waits for this file and must not read a part of it.
        half = Path(f"{options['error_file']}.half")
        half.write_text(f"{type(error).__name__}: {error}")
        half.rename(options["error_file"])


def import_package(package: Path) -> None:
    """Import this package from its folder, unless it is already imported."""
    if "vllmops" in sys.modules:
        return
    if sys.version_info < (3, 11):  # noqa: UP036 - the process brings its own Python
        raise RuntimeError(f"Python {sys.version.split()[0]} is too old: vllmops needs 3.11")
    spec = spec_from_file_location(
        "vllmops", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["vllmops"] = module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "vllmops attach":
    boot_agent(globals()["options"])
