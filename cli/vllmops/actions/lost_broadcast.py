"""A message between engine and worker whose notification was lost."""

from __future__ import annotations

from ..model.roles import Role
from .action import AgentAction


class LostBroadcast(AgentAction):
    name = "broadcast"
    state = "a message between engine and worker is in shared memory, and its reader sleeps"
    does = "makes the reader look again, from now on every 5 seconds"
    risk = "none"
    reference = "https://github.com/vllm-project/vllm/pull/45224"
    roles = (Role.WORKER, Role.ENGINE)
