"""What an API server counts as it happens; with several of them, prometheus_client adds them up.

Imported only after vLLM has imported prometheus_client, which reads the environment then.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Histogram

from vllmops.metrics.metric_families import PREFIX

STORE_SECONDS: Final = Histogram(
    f"{PREFIX}store_operation_seconds",
    "Time of an operation of the store",
    ("backend", "operation"),
    buckets=(0.002, 0.01, 0.05, 0.25, 1.0),
)
STORE_FAILURES: Final = Counter(
    f"{PREFIX}store_failures",
    "Operations of the store that failed",
    ("backend", "operation", "reason"),
)
CARRIERS: Final = Counter(
    f"{PREFIX}carriers",
    "Carriers that were opened, sealed or refused, and why",
    ("action", "reason"),
)
COUNTERS: Final = (STORE_SECONDS, STORE_FAILURES, CARRIERS)
