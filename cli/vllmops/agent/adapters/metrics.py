"""Shows metrics of ours in vLLM's ``/metrics``, in any version.

vLLM scrapes the registry of prometheus_client; with several API servers a new one each time, with
the collector in it that reads the files of all processes.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, Final


def own(collector: Any, module: ModuleType) -> None:
    """With one API server: prometheus_client's own registry."""
    module.REGISTRY.register(collector)


def fresh(collector: Any, module: ModuleType) -> None:
    """With several API servers: the registry of each scrape."""
    cls = module.MultiProcessCollector
    construct = cls.__init__
    if hasattr(construct, "__vllmops__"):
        return

    @functools.wraps(construct)
    def init(self: Any, registry: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, registry, *args, **kwargs)
        registry.register(collector)

    init.__vllmops__ = True  # type: ignore[attr-defined]
    cls.__init__ = init


# By the module that is to be imported first; each takes a collector that describes nothing.
SHOWN: Final = {"prometheus_client.registry": own, "prometheus_client.multiprocess": fresh}
