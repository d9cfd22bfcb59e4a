"""Runs inside vLLM's processes: patches them, observes their caches and answers on a socket.

It must never make the server worse: nothing here raises into vLLM, takes one of its locks, or
imports more than the standard library and what vLLM itself depends on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial

from .log import log
from .versions import module_locations as places


def register() -> None:
    """Start the agent in this process; the ``vllm.general_plugins`` entry point.

    ``VLLMOPS_DISABLE=1`` turns it off. Never raises: an exception out of a plug-in would abort
    vLLM's start. A second call does nothing.
    """
    if os.environ.get("VLLMOPS_DISABLE") == "1" or is_inspection_process():
        return
    try:
        from .transport import unix_socket as service  # noqa: PLC0415

        instrument_vllm()
        add_server_features()
        service.start_agent()
    except Exception as error:
        log.warning("vllmops: the agent does not start in pid %d: %r", os.getpid(), error)


def instrument_vllm(withheld: Mapping[str, str] | None = None) -> None:
    """Hook and patch vLLM's classes, also for `attach`.

    Args:
        withheld: patches that are not applied, and why, by id.
    """
    from .actions import blocked_event_loop as event_loop  # noqa: PLC0415
    from .actions import dead_io_threads as io_threads  # noqa: PLC0415
    from .actions import input_sockets as sockets  # noqa: PLC0415
    from .hooks import socket_handover as handover  # noqa: PLC0415
    from .hooks import unsendable_requests as unsent  # noqa: PLC0415
    from .hooks import vllm_objects as objects  # noqa: PLC0415
    from .patches import registry  # noqa: PLC0415
    from .recording import step_recorder as recorder  # noqa: PLC0415
    from .state import cache_comparison as compare  # noqa: PLC0415
    from .transport import unix_socket as service  # noqa: PLC0415

    objects.report_compatibility()
    objects.hook_constructors(service.start_agent)
    compare.install_hooks()
    unsent.install_hook()
    recorder.install_recorder(service.make_agent_directory)
    event_loop.install_signal_handler()
    handover.install_hooks()
    io_threads.install_excepthook()
    objects.when_symbol_imported("engine-core", sockets.hook_input_thread)
    registry.install_patches(withheld)


def add_server_features() -> None:
    """Add keys, stored responses, admin routes and metrics to a server that starts."""
    from vllmops_responses.server import installation as hook  # noqa: PLC0415
    from vllmops_responses.server import keyring_follower as keys  # noqa: PLC0415
    from vllmops_responses.store import settings  # noqa: PLC0415

    from . import identity  # noqa: PLC0415
    from .transport import admin_routes as admin  # noqa: PLC0415
    from .transport import metrics  # noqa: PLC0415

    if identity.detect_role() == "api":
        metrics.install_collector()
        hook.replace_routes_on_import(keys.get_keyring)
    admin.install_routes(partial(keys.merge_keyring, carriers=settings.parse_carrier_settings))
    keys.start_key_holder()


def is_inspection_process() -> bool:
    """Whether this is the subprocess in which vLLM inspects a model class, then exits."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and places.is_inspection_module(spec.name)
