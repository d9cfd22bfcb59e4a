"""Shows metrics of ours in vLLM's ``/metrics``, in any version.

vLLM scrapes the registry of prometheus_client; with several API servers a new one each time, with
the collector in it that reads the files of all processes.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, Final


def register_globally(collector: Any, module: ModuleType) -> None:
    """With one API server: prometheus_client's own registry."""
    module.REGISTRY.register(collector)


def register_per_scrape(collector: Any, module: ModuleType) -> None:
    """With several API servers: the registry of each scrape."""
    cls = module.MultiProcessCollector
    construct = cls.__init__
    if hasattr(construct, "__vllmops__"):
        return

    @functools.wraps(construct)
    def construct_and_register(self: Any, registry: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, registry, *args, **kwargs)
        registry.register(collector)

    construct_and_register.__vllmops__ = True  # type: ignore[attr-defined]
    cls.__init__ = construct_and_register


# By the module that is to be imported first; each takes a collector that describes nothing.
SHOWN: Final = {
    "prometheus_client.registry": register_globally,
    "prometheus_client.multiprocess": register_per_scrape,
}

# Names the directory that all processes write their metrics to; set for several API servers.
MULTIPROC_DIR: Final = "PROMETHEUS_MULTIPROC_DIR"

# Checks the names of metrics and labels in each line of each scrape.
FORMAT: Final = "prometheus_client.openmetrics.exposition"
MOST_NAMES: Final = 2048  # of which a server has a few hundred


def cache_escaped_names(module: ModuleType) -> None:
    """Let prometheus_client remember the names that it has checked; a scrape takes less time then.

    What it makes of a name depends on the name alone. Versions before 0.22 check none.
    """
    for function in ("escape_metric_name", "escape_label_name"):
        escape = getattr(module, function, None)
        if escape and not hasattr(escape, "cache_info"):
            setattr(module, function, functools.lru_cache(MOST_NAMES)(escape))
