"""Runs inside vLLM's processes: patches them, finds their caches, answers on a socket, beats.

It must never make the server worse: nothing here raises into vLLM, takes one of its locks, or
imports more than the standard library and what vLLM itself depends on.
"""

from __future__ import annotations

import os
import sys

from .log import log


def register() -> None:
    """Start the agent in this process; the ``vllm.general_plugins`` entry point.

    ``VLLMOPS_DISABLE=1`` turns it off. Never raises: an exception out of a plug-in would abort
    vLLM's start. Calling it again does nothing.
    """
    if os.environ.get("VLLMOPS_DISABLE") == "1" or short_lived():
        return
    try:
        from . import admin, compare, found, keys, service, stored  # noqa: PLC0415
        from .patches import registry  # noqa: PLC0415

        found.install(service.start)
        compare.install()
        registry.install()
        stored.install()
        admin.install()
        keys.start()
        service.start()
    except Exception as error:
        log.warning("vllmops: the agent is off in pid %d: %r", os.getpid(), error)


def short_lived() -> bool:
    """Whether this is the subprocess in which vLLM inspects a model class, then exits."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name == "vllm.model_executor.models.registry"
