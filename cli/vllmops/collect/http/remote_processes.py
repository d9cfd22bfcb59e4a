"""The processes of a server on another machine, and their agents, through its admin routes."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from ...model.admin_api import PROCESSES, TIMEOUT, ServerProcesses
from ...model.ranks import Placement
from ...model.roles import Role
from ...model.snapshot_files import DAMAGE
from ...support.errors import VllmopsError
from ..agents import agent_client
from ..agents.agent_files import ProxiedProcess, TimedHeartbeat
from .admin_client import REFUSED, AdminClient

# On top of what an agent may take: the network, and the server's own way to the agent.
SLACK_S = 3.0
FRESH_S = 0.2


class RemoteServer:
    """The processes of a remote server.

    Args:
        admin: its admin routes.
    """

    def __init__(self, admin: AdminClient) -> None:
        self.admin = admin
        self.last_answer: tuple[float, ServerProcesses] | None = None
        self.lost_at: float | None = None
        self.lock = threading.Lock()

    def fetch_snapshot(self) -> ServerProcesses:
        """Its processes now; questions of one moment share an answer.

        Raises:
            VllmopsError: as `AdminClient.send_request` and
                `collect.agents.agent_client.decode_answer` do.
        """
        with self.lock:
            if self.last_answer is None or time.monotonic() - self.last_answer[0] > FRESH_S:
                try:
                    answer = self.admin.send_request("GET", PROCESSES)
                except VllmopsError as error:
                    lost = error.code == "admin.unreachable"
                    self.lost_at = (self.lost_at or time.monotonic()) if lost else None
                    raise
                self.lost_at = None
                if not answer.is_success:
                    raise self.admin.make_answer_error(answer)
                members = agent_client.decode_answer(
                    self.admin.endpoint.name, answer.content, ServerProcesses
                )
                self.last_answer = time.monotonic(), members
            return self.last_answer[1]

    @property
    def unreachable_s(self) -> float:
        """For how many seconds it can't be reached; 0 if somebody took the last connection."""
        return 0.0 if self.lost_at is None else time.monotonic() - self.lost_at

    def list_processes(self) -> tuple[RemoteProcess, ...]:
        """Its processes, root first."""
        return tuple(
            RemoteProcess(
                role=Role(member.role) if member.role in set(Role) else Role.OTHER,
                pid=member.pid,
                start_ticks=member.start_ticks,
                title=member.title,
                rss_bytes=member.rss_bytes,
                boot=member.boot,
                place=Placement(**member.placement_fields()),
                began_at=member.create_time,
                path=member.route_prefix,
                fleet=self,
            )
            for member in self.fetch_snapshot().processes
        )


@dataclass(frozen=True, kw_only=True)
class RemoteProcess(ProxiedProcess):
    """A process of a server on another machine.

    Args:
        began_at: when it started, in seconds since the epoch by the clock of its machine.
        path: of its agent's routes.
        fleet: what it is asked through.
    """

    began_at: float
    path: str
    fleet: RemoteServer

    @property
    def create_time(self) -> float:
        return self.began_at

    def send_request(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        admin, header = self.fleet.admin, {TIMEOUT: f"{timeout_s:g}"}
        answer = admin.send_request(method, f"{self.path}{path}", timeout_s + SLACK_S, body, header)
        if not answer.is_success:
            # An answer of the agent itself has another form.
            with suppress(*DAMAGE):
                raise admin.make_refusal_error(REFUSED.decode(answer.content).error)
        return answer.status_code, answer.content

    def fetch_heartbeat(self) -> TimedHeartbeat | None:
        pulses = self.fleet.fetch_snapshot().heartbeats
        own = (p for p in pulses if (p.node, p.pid) == (self.place.node, self.pid))
        return next((TimedHeartbeat(p.heartbeat, p.age_s) for p in own), None)
