"""Loads the package that adds keys and stored responses to the agent of a server that starts.

It is `vllmops_responses`. `attach` does not load it: a server that runs already gets neither.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ..model.environment import SIGNING_KEY
from ..model.server_metrics import StoreUsage
from ..support.error_codes import ErrorCode
from .hooks import vllm_objects

# Named in text, so that the agent does not need it. An entry point would cost each process of vLLM
# some milliseconds, and let any package in.
MODULE = "vllmops_responses.server.extension"


@dataclass(frozen=True)
class AdminRoute:
    """A route for admins, which `transport.admin_routes` answers.

    Args:
        answer: makes the content of the answer from the body of the request; it may block, and
            refuses with VllmopsError.
        max_bytes: of the body; a GET has none.
        too_large: the code of the error if there are more.
    """

    answer: Callable[[bytes], Any]
    max_bytes: int = 0
    too_large: ErrorCode = "admin.too-large"


@dataclass(frozen=True)
class Extension:
    """The parts of the package that the agent calls.

    Args:
        install: hooks the package into this process.
        agent_gets: routes of the agent's socket, by path.
        admin_routes: by method and path.
        read_store_usage: counts what the store holds, None while that is unknown; never waits.
    """

    install: Callable[[], None] = lambda: None
    agent_gets: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    admin_routes: Mapping[tuple[str, str], AdminRoute] = field(default_factory=dict)
    read_store_usage: Callable[[], StoreUsage | None] = lambda: None


def load_extension() -> Extension:
    """The package's extension; an empty one, and a report, if it can't be imported."""
    try:
        extension: Extension = import_module(MODULE).EXTENSION
    except Exception as error:
        report_failure(error)
        # The package would have done so: a child process must not inherit the signing key.
        os.environ.pop(SIGNING_KEY, None)
        return Extension()
    return extension


def install_extension(extension: Extension) -> None:
    """Hook an extension into this process; if that fails, the agent reports it and goes on."""
    try:
        extension.install()
    except Exception as error:
        report_failure(error)


def report_failure(error: Exception) -> None:
    vllm_objects.report_problem(f"keys and stored responses are not available: {error!r}")
