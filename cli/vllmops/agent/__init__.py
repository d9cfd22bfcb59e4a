"""Runs inside vLLM's processes: patches them, observes their caches and answers on a socket.

It must never make the server worse: nothing here raises into vLLM, takes one of its locks, or
imports more than the standard library and what vLLM itself depends on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from .log import log
from .versions import module_locations


def register() -> None:
    """Start the agent in this process; the ``vllm.general_plugins`` entry point.

    ``VLLMOPS_DISABLE=1`` turns it off. Never raises: an exception out of a plug-in would abort
    vLLM's start. A second call does nothing.
    """
    if os.environ.get("VLLMOPS_DISABLE") == "1" or is_inspection_process():
        return
    try:
        from .transport import unix_socket  # noqa: PLC0415

        instrument_vllm()
        add_server_features()
        unix_socket.start_agent()
    except Exception as error:
        log.warning("vllmops: the agent does not start in pid %d: %r", os.getpid(), error)


def instrument_vllm(withheld: Mapping[str, str] | None = None) -> None:
    """Hook and patch vLLM's classes, also for `attach`.

    Args:
        withheld: patches that are not applied, and why, by id.
    """
    from .actions import (  # noqa: PLC0415
        blocked_event_loop,
        dead_io_threads,
        input_sockets,
    )
    from .hooks import (  # noqa: PLC0415
        socket_handover,
        unsendable_requests,
        vllm_objects,
    )
    from .patches import registry  # noqa: PLC0415
    from .recording import step_recorder  # noqa: PLC0415
    from .state import cache_comparison  # noqa: PLC0415
    from .transport import unix_socket  # noqa: PLC0415

    vllm_objects.report_compatibility()
    vllm_objects.hook_constructors(unix_socket.start_agent)
    cache_comparison.install_hooks()
    unsendable_requests.install_hook()
    step_recorder.install_recorder(unix_socket.make_agent_directory)
    blocked_event_loop.install_signal_handler()
    socket_handover.install_hooks()
    dead_io_threads.install_excepthook()
    vllm_objects.when_symbol_imported("engine-core", input_sockets.hook_input_thread)
    registry.install_patches(withheld)


def add_server_features() -> None:
    """Add admin routes, metrics and the extension to a server that starts."""
    from . import extensions, identity  # noqa: PLC0415
    from .transport import admin_routes, metrics_route, unix_socket  # noqa: PLC0415

    extension = extensions.load_extension()
    unix_socket.GETS.update(extension.agent_gets)
    if identity.detect_role() == "api":
        metrics_route.install_collector(extension.read_store_usage)
    extensions.install_extension(extension)
    admin_routes.install_routes(extension.admin_routes)


def is_inspection_process() -> bool:
    """Whether this is the subprocess in which vLLM inspects a model class, then exits."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and module_locations.is_inspection_module(spec.name)
