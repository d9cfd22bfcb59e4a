"""Several processes write one response at a time: nothing comes back, nothing is undone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vllmops_responses.store import backend_factory
from vllmops_responses.store.backend import Response
from vllmops_responses.store.response_store import ResponseStore

from ...support.extent import EVERYTHING

PROCESSES = 3
WAYS = ["progress", "complete", "fail", "cancel", "delete", "append", "get"]
# Few of many would end it, so that there is something to fight for.
DEEDS = st.lists(st.sampled_from(WAYS), min_size=1, max_size=6)


def test_concurrent_writers_leave_one_consistent_status(
    shared_url: str, writer: Callable[..., Any]
) -> None:
    writers = [writer(shared_url) for _ in range(PROCESSES)]
    store = ResponseStore(backend_factory.make_backend(shared_url))
    kinds: set[str | None] = set()

    @settings(
        max_examples=60 if EVERYTHING else 8,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @example([["complete"], ["get"], ["append"]])
    @example([["fail"], ["get"], ["progress"]])
    @example([["cancel"], ["cancel"], ["cancel", "get"]])
    @example([["delete"], ["delete"], ["delete", "get"]])
    @given(st.lists(DEEDS, min_size=PROCESSES, max_size=PROCESSES))
    def fight(deeds: list[list[str]]) -> None:
        async def begin() -> Response:
            response = Response(
                id=f"resp_{time.time_ns()}",
                owner="ann",
                model="m",
                status="queued",
                body=b'{"status":"queued"}',
            )
            assert await store.create(response)
            return response

        async def end(response: Response) -> str | None:
            found = await store.get("ann", response.id)
            return found.status if found else None

        response = runner.run(begin())
        for item, deed in zip(writers, deeds, strict=True):
            item.send(id=response.id, created_at=response.created_at, do=deed)
        answers = [json.loads(item.read()) for item in writers]
        judge([list(zip(*both, strict=True)) for both in zip(deeds, answers, strict=True)])
        final = runner.run(end(response))
        kinds.add(final)
        done = {
            what
            for deed, words in zip(deeds, answers, strict=True)
            for what, ok in zip(deed, words, strict=True)
            if ok is True
        }
        if "delete" in done:
            assert final is None
        elif "cancel" in done:
            assert final == "cancelled"
        elif "complete" in done:
            assert final == "completed"
        elif "fail" in done:
            assert final == "failed"
        else:
            assert final in {"queued", "in_progress"}

    with asyncio.Runner() as runner:
        runner.run(store.open())
        fight()
        runner.run(store.close())
    assert {None, "cancelled", "completed", "failed"} <= kinds


def judge(shown: list[list[tuple[str, Any]]]) -> None:
    """What each process saw, in its order: an end is told once, and what is gone stays gone."""
    ends = [what for item in shown for what, ok in item if ok is True]
    assert sum(what in {"complete", "fail", "cancel"} for what in ends) <= 1
    assert ends.count("delete") <= 1
    final = {"cancel": "cancelled", "complete": "completed", "fail": "failed"}
    for item in shown:
        ended, gone = "", False
        for what, answer in item:
            if gone:
                assert not answer
            if ended and what in final:
                assert answer is False
            if ended and what == "get":
                assert answer in {final[ended], None}
            if answer is True and what in final:
                ended = what
            gone |= (what == "delete") or (what == "get" and answer is None)
