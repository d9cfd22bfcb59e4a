"""What is counted of the store and of carriers."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import REGISTRY

from vllmops_responses.keys.carrier import CarrierError, CarrierProblem
from vllmops_responses.server.instrumentation import count_carrier, count_store_operations
from vllmops_responses.store.backend import EVERYBODY, Limits
from vllmops_responses.store.backends.memory import Memory
from vllmops_responses.store.response_store import ResponseStore


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"vllmops:{name}", labels) or 0.0


def test_operations_of_the_store() -> None:
    backend = Memory("memory://", Limits())
    count_store_operations(backend)
    labels = {"backend": "memory", "operation": "get"}
    before = value("store_operation_seconds_count", **labels)

    async def run() -> None:
        async with ResponseStore(backend) as store:
            assert await store.get(EVERYBODY, "resp_1") is None
            assert await store.get(EVERYBODY, "resp_2") is None
            assert (await store.collect_stats(EVERYBODY)).response_count == 0

    asyncio.run(run())
    assert value("store_operation_seconds_count", **labels) == before + 2
    assert value("store_failures_total", **labels, reason="") == 0


def test_failures_and_cancellations_stay_what_they_are() -> None:
    class Broken(Memory):
        async def get(self, owner: str, response_id: str) -> None:
            if response_id == "slow":
                await asyncio.sleep(30)
            raise OSError("gone")

    backend = Broken("memory://", Limits())
    count_store_operations(backend)
    with pytest.raises(OSError, match="gone"):
        asyncio.run(backend.get("", "any"))

    async def get_with_timeout() -> None:
        async with asyncio.timeout(0.01):
            await backend.get("", "slow")

    with pytest.raises(TimeoutError):
        asyncio.run(get_with_timeout())
    for reason in ("OSError", "cancelled"):
        assert value("store_failures_total", backend="broken", operation="get", reason=reason) == 1


def test_carriers() -> None:
    before = value("carriers_total", action="refused", reason="expired")
    count_carrier("opened")
    count_carrier("opened", CarrierError(CarrierProblem.EXPIRED, "too old"))
    assert value("carriers_total", action="refused", reason="expired") == before + 1
    assert value("carriers_total", action="opened", reason="") >= 1
