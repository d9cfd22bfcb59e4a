"""Runs inside vLLM's processes: takes what the agent does away and puts it back, as it is told.

On the socket whose path is in its globals, ``path``, it first says which hooks it found. Then each
byte is an order: ``1`` for all, ``2`` for all but its metrics, ``0`` for neither these nor hooks.
The answer is how many seconds of CPU the agent's threads took.
"""

from __future__ import annotations

import functools
import socket
import sys
import threading
import time
from types import FunctionType
from typing import Any

Hook = tuple[type, str, Any]


def hooks() -> list[Hook]:
    """Every method that the agent has wrapped: its class, its name, and the wrapper."""
    classes = {
        id(item): item
        for module in list(sys.modules.values())
        for item in list(getattr(module, "__dict__", {}).values())
        if issubclass(type(item), type)  # asking a proxy for its class can do anything
    }
    return [
        (cls, name, method)
        for cls in classes.values()
        for name, method in list(vars(cls).items())
        if isinstance(method, FunctionType)
        and method.__globals__.get("__name__", "").startswith(
            ("vllmops.agent.", "vllmops_responses.server.")
        )
        and hasattr(method, "__wrapped__")
    ]


def collectors() -> list[Any]:
    """What shows the agent's metrics in an API server, and gathers them while they are scraped."""
    scraped = sys.modules.get("prometheus_client.registry")
    found = scraped.REGISTRY._collector_to_names if scraped else ()
    return [item for item in found if type(item).__module__ == "vllmops.metrics.collector"]


class Switch:
    """Stands before each hook, and leads to it or around it.

    Putting methods in and out instead would make Python forget what it knows of their classes, and
    run slower for a while each time.
    """

    def __init__(self, found: list[Hook]) -> None:
        self.on = self.shown = True
        self.collectors = collectors()
        for item in self.collectors:
            item.wait = bool  # of the seconds: the thread ends once it has gathered
        for cls, name, method in found:
            setattr(cls, name, self.either(method, method.__wrapped__))

    def either(self, hooked: Any, bare: Any) -> Any:
        @functools.wraps(hooked)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (hooked if self.on else bare)(*args, **kwargs)

        return call

    def show(self, shown: bool) -> None:
        """Show the agent's metrics or not, once what gathers them is done with the last scrape."""
        for item in self.collectors:
            while item.pid:
                time.sleep(0.001)
            if shown is not self.shown:
                registry = sys.modules["prometheus_client.registry"].REGISTRY
                (registry.register if shown else registry.unregister)(item)
        self.shown = shown

    def end(self) -> None:
        """Show and gather the metrics as before."""
        self.show(True)
        for item in self.collectors:
            item.wait = time.sleep


def cpu_seconds() -> float:
    """CPU time of the agent's threads so far."""
    clocks = [
        time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.name.startswith("vllmops-") and thread.ident
    ]
    return sum(map(time.clock_gettime, clocks))


def obey(path: str) -> None:
    """Switch as it is told, until nobody is there to tell; then the hooks are back as they were."""
    found = hooks()
    with socket.socket(socket.AF_UNIX) as teller:
        teller.connect(path)
        names = [f"{cls.__name__}.{name}" for cls, name, _ in found]
        teller.sendall(f"{' '.join(names)}\n".encode())
        switch = Switch(found)
        try:
            while order := teller.recv(1):
                switch.on = order != b"0"
                switch.show(order == b"1")
                teller.sendall(f"{cpu_seconds()}\n".encode())
        finally:
            switch.end()
            for cls, name, method in found:
                setattr(cls, name, method)


if __name__ == "vllmops benchmark":
    obey(globals()["path"])
