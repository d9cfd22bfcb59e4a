"""Whether the other nodes of a server still answer: a cut network ends none of its processes.

Nothing but the addresses is known of them. A host that is there refuses a connection to a port on
which nobody listens; one that never did so, behind a firewall that drops it, is not watched.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Sequence

from ..collect.machine.connected_nodes import find_node_addresses
from ..collect.machine.processes import Process

PORT = 9  # "discard", which nobody serves any more
TIMEOUT_S = 1.5
UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
MISSED = 3  # answers in a row, and the node counts as lost
LEARN_S = 30.0  # between two looks for addresses


class PeerNodes:
    """The other nodes, by their addresses, and how many answers in a row each has missed."""

    def __init__(self) -> None:
        self.missed_answers: dict[str, int] = {}
        self.learnt = -LEARN_S

    async def check_nodes(self, tree: Sequence[Process], port: int | None) -> None:
        """Ask each node that the server is connected with.

        Args:
            tree: the server's processes.
            port: where it serves HTTP: who connects to that is no node.
        """
        asked = set(self.missed_answers)
        if time.monotonic() - self.learnt >= LEARN_S:
            self.learnt = time.monotonic()
            now = await asyncio.to_thread(find_node_addresses, tree, port)
            # A host without a connection is forgotten, unless it is missing: its connections end.
            self.missed_answers = {
                a: missed for a, missed in self.missed_answers.items() if missed or a in now
            }
            asked = now | self.missed_answers.keys()
        for address, there in zip(
            asked, await asyncio.gather(*map(is_reachable, asked)), strict=True
        ):
            if there:
                self.missed_answers[address] = 0
            elif there is False and address in self.missed_answers:
                self.missed_answers[address] += 1

    @property
    def lost_addresses(self) -> list[str]:
        """The addresses of the nodes that have ceased to answer."""
        return sorted(address for address, count in self.missed_answers.items() if count >= MISSED)


async def is_reachable(address: str) -> bool | None:
    """Whether a host takes a connection, or refuses it; None if this process can't ask it."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            _, writer = await asyncio.open_connection(address, PORT)
            writer.close()
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    except TimeoutError:
        return False
    except OSError as error:
        return False if error.errno in UNREACHABLE else None
    return True
