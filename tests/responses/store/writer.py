"""A process of its own on a store: does what it is told on stdin, one line of JSON at a time.

``{"id": …, "created_at": …, "do": ["cancel", "complete", …]}`` is answered by what each of them
gave. ``{"store": "PREFIX"}`` stores without end, and prints each id once that was acknowledged.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys

from msgspec.structs import replace

from vllmops_responses.store import backend_factory
from vllmops_responses.store.backend import Limits, Response
from vllmops_responses.store.backends import sqlite
from vllmops_responses.store.response_store import ResponseStore

OWNER = "ann"
sqlite.BUSY_S = 60.0  # another process that has the file may stand still


def make_response(name: str, created_at: float, status: str = "in_progress") -> Response:
    body = json.dumps({"id": name, "status": status}).encode()
    return Response(
        id=name, owner=OWNER, model="m", status=status, created_at=created_at, body=body
    )


async def do(store: ResponseStore, what: str, response: Response) -> object:
    """One operation, and what it gave."""
    match what:
        case "cancel":
            return (await store.set_status(OWNER, response.id, "cancelled")).changed
        case "delete":
            return await store.delete(OWNER, response.id)
        case "append":
            return await store.append_events(response, 0, [b"{}"])
        case "get":
            found = await store.get(OWNER, response.id)
            return found and found.status
    status = {"progress": "in_progress", "complete": "completed", "fail": "failed"}[what]
    body = json.dumps({"id": response.id, "status": status}).encode()
    return await store.put(replace(response, status=status, body=body))


async def main(url: str, lease_s: float) -> None:
    store = ResponseStore(backend_factory.make_backend(url, Limits(lease_s=lease_s)), deadline_s=60)
    loop = asyncio.get_running_loop()
    async with store:
        print("ready", flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            order = json.loads(line)
            if "do" in order:
                response = make_response(order["id"], order["created_at"])
                print(json.dumps([await do(store, what, response) for what in order["do"]]))
                sys.stdout.flush()
                continue
            for number in itertools.count():
                response = make_response(f"{order['store']}{number}", 1e9 + number)
                assert await store.create(response)
                assert await store.put(replace(response, status="completed"))
                assert await store.append_events(response, 0, [b'{"sequence_number":0}'])
                print(response.id, flush=True)


asyncio.run(main(sys.argv[1], float(sys.argv[2])))
