"""Counts what the server's store and its carriers do, into prometheus_client's counters."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ..keys.carrier import CarrierError
from ..store.backend import OPERATIONS, Backend


def count_store_operations(backend: Backend) -> None:
    """Count the operations of a backend, which it does as before."""
    from .metrics import CARRIERS  # noqa: PLC0415 - see there

    for action in ("opened", "sealed"):
        CARRIERS.labels(action, "")  # begins with 0, so that the first one is seen
    name = type(backend).__name__.lower()
    for method, operation in OPERATIONS.items():
        setattr(backend, method, wrap_with_counters(getattr(backend, method), name, operation))


def wrap_with_counters(
    call: Callable[..., Awaitable[Any]], backend: str, operation: str
) -> Callable[..., Awaitable[Any]]:
    """A method of a backend that counts its time and its failures."""
    from .metrics import STORE_FAILURES, STORE_SECONDS  # noqa: PLC0415 - see there

    @functools.cache
    def get_duration_metric() -> Any:
        # What is never called has no lines in each scrape.
        return STORE_SECONDS.labels(backend, operation)

    @functools.wraps(call)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return await call(*args, **kwargs)
        except asyncio.CancelledError:  # its deadline, or a client who has left
            STORE_FAILURES.labels(backend, operation, "cancelled").inc()
            raise
        except Exception as error:
            STORE_FAILURES.labels(backend, operation, type(error).__name__).inc()
            raise
        finally:
            get_duration_metric().observe(time.perf_counter() - began)

    return wrapper


def count_carrier(action: str, error: CarrierError | None = None) -> None:
    """Count a carrier.

    Args:
        action: ``opened`` or ``sealed``; with an error it counts as ``refused``.
        error: why it was refused.
    """
    from .metrics import CARRIERS  # noqa: PLC0415 - see there

    if error is None:
        CARRIERS.labels(action, "").inc()
    else:
        CARRIERS.labels("refused", error.case.value).inc()
