"""Runs inside vLLM's processes: patches them, observes their caches and answers on a socket.

It must never make the server worse: nothing here raises into vLLM, takes one of its locks, or
imports more than the standard library and what vLLM itself depends on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial

from .adapters import places
from .log import log


def register() -> None:
    """Start the agent in this process; the ``vllm.general_plugins`` entry point.

    ``VLLMOPS_DISABLE=1`` turns it off. Never raises: an exception out of a plug-in would abort
    vLLM's start. A second call does nothing.
    """
    if os.environ.get("VLLMOPS_DISABLE") == "1" or short_lived():
        return
    try:
        from . import service  # noqa: PLC0415

        observe()
        serve()
        service.start()
    except Exception as error:
        log.warning("vllmops: the agent does not start in pid %d: %r", os.getpid(), error)


def observe(withheld: Mapping[str, str] | None = None) -> None:
    """Hook and patch vLLM's classes, also for `attach`.

    Args:
        withheld: patches that are not applied, and why, by id.
    """
    from . import compare, handover, objects, recorder, service, unsent  # noqa: PLC0415
    from .heal import event_loop, io_threads, sockets  # noqa: PLC0415
    from .patches import registry  # noqa: PLC0415

    objects.check()
    objects.install(service.start)
    compare.install()
    unsent.install()
    recorder.install(service.own_directory)
    event_loop.install()
    handover.install()
    io_threads.watch()
    objects.watch("engine-core", sockets.keep)
    registry.install(withheld)


def serve() -> None:
    """Add keys, stored responses, admin routes and metrics to a server that starts."""
    from ..store import settings  # noqa: PLC0415
    from . import admin, identity, keys, metrics  # noqa: PLC0415
    from .responses import hook  # noqa: PLC0415

    if identity.role() == "api":
        metrics.install()
        hook.install(keys.ring)
    admin.install(partial(keys.accept, carriers=settings.carriers))
    keys.start()


def short_lived() -> bool:
    """Whether this is the subprocess in which vLLM inspects a model class, then exits."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and places.inspects_models(spec.name)
