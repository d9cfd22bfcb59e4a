"""Many small HTTP servers that answer as the admin routes of a vLLM server do; run as a program.

Its words are how many, the seconds until one lists its processes (``inf``: until each of them has
been asked), and the admin token; then, maybe,
an address and a file with a certificate and its key for TLS. It prints the ports.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import sys
import time

import msgspec

from vllmops.model.admin_api import PROCESSES, Refusal, RefusalBody, ServerProcess, ServerProcesses
from vllmops.model.agent_state import EngineState, Hello, Traffic
from vllmops.model.cache_repairs import ProcessRepair
from vllmops.model.caches import ProcessCaches
from vllmops.model.keys import ProcessKeys
from vllmops.model.patches import ProcessPatches
from vllmops.model.stacks import AgentStacks, ProcessStacks

ROLES = {11: "api", 12: "engine", 13: "worker"}


def member(pid: int) -> ServerProcess:
    return ServerProcess(
        role=ROLES[pid],
        pid=pid,
        create_time=time.time() - 60,
        state="S",
        rss_bytes=1 << 30,
        start_ticks=pid,
        boot="there",
    )


def content(path: str) -> object:
    """The answer of a route."""
    if path == PROCESSES:
        processes = tuple(map(member, ROLES))
        return ServerProcesses(vllmops="0", node="there", model="m", processes=processes)
    pid, _, route = path.removeprefix(f"{PROCESSES}/").partition("/")
    role = ROLES[int(pid)]
    match route:
        case "hello":
            return Hello(agent="0", pid=int(pid), role=role)
        case "engine":
            return EngineState(running=1, waiting=2)
        case "traffic":
            return Traffic(in_flight=0, started_requests=0)
        case "caches":
            return ProcessCaches(pid=int(pid), parent=1, role=role)
        case "repair":
            return ProcessRepair(pid=int(pid), role=role, dry_run=False, caches=[], seconds=0.0)
        case "stacks":
            stacks = ProcessStacks(role=role, pid=int(pid), create_time=0.0, source="agent")
            return AgentStacks(stacks=stacks)
        case "keys":
            return ProcessKeys(pid=int(pid), role=role)
        case "patches":
            return ProcessPatches(
                pid=int(pid), role=role, vllm_version="0.32.0", patches=[], seconds=0.0
            )
    raise KeyError(route)


class Small:
    """What each of the servers does.

    Args:
        count: of all servers.
        delay_s: until it lists its processes; infinite: until each of them has been asked.
        token: the admin token.
    """

    def __init__(self, count: int, delay_s: float, token: str) -> None:
        self.count = count
        self.delay_s = delay_s
        self.token = token
        self.asked = set[object]()
        self.all_asked = asyncio.Event()

    async def delay(self, writer: asyncio.StreamWriter) -> None:
        if self.delay_s < math.inf:
            await asyncio.sleep(self.delay_s)
            return
        self.asked.add(writer.get_extra_info("sockname"))
        if len(self.asked) == self.count:
            self.all_asked.set()
        await self.all_asked.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await self.head(reader):
            first, *fields = head.decode().splitlines()
            path = first.split()[1]
            status, body = 200, b""
            if path.startswith(PROCESSES):
                if f"authorization: bearer {self.token}" not in [f.lower() for f in fields]:
                    status = 401
                    body = msgspec.json.encode(RefusalBody(Refusal("admin.refused", "no")))
                else:
                    if path == PROCESSES:
                        await self.delay(writer)
                    body = msgspec.json.encode(content(path))
            writer.write(
                b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)
            )
            await writer.drain()

    async def head(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""


async def main() -> None:
    count, delay_s, token = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    small = Small(count, delay_s, token.lower())
    host, tls = "127.0.0.1", None
    if sys.argv[4:]:
        host, tls = sys.argv[4], ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(sys.argv[5])
    servers = [await asyncio.start_server(small.serve, host, 0, ssl=tls) for _ in range(count)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
