"""Take a server out of service without a stop, and put it back."""

from __future__ import annotations

from contextlib import suppress

from ..collect.agents import agent_client, agent_files
from ..model.agent_state import Traffic
from ..model.roles import ROLES, Role
from ..support.errors import VllmopsError
from .discovery import Server


def set_draining(server: Server, *, draining: bool) -> list[Traffic]:
    """Make every API server refuse new requests with 503, or take them again.

    Args:
        server: on this machine or another one.
        draining: whether to refuse.

    Returns:
        The traffic of each API server.

    Raises:
        VllmopsError: ``drain.no-api-server``, or ``drain.no-agent`` if one could not be told; the
            others were.
    """
    apis = server.select_processes(Role.API)
    if not apis:
        raise VllmopsError(
            "drain.no-api-server",
            f"{server.label} has no API server here that could be told",
            "drain the server whose API server takes its requests; vllmops ps shows it",
        )
    told, silent = agent_client.collect_answers(
        apis, lambda process: agent_client.open_agent(process).set_draining(draining)
    )
    if silent:
        what = f"{len(silent)} of {len(apis)} API servers of {server.label} could not be told"
        raise agent_client.make_no_answer_error("drain.no-agent", what, silent)
    return told


def explain_unreadiness(server: Server) -> str:
    """Why new requests had better go to another server, by its heartbeats; empty without reason."""
    reasons: dict[str, None] = {}
    for process in server.select_processes(*ROLES):
        with suppress(VllmopsError):
            pulse = agent_files.read_heartbeat(process)
            if pulse and pulse.heartbeat.unready:
                reasons[pulse.heartbeat.unready] = None
    return ", ".join(reasons)
