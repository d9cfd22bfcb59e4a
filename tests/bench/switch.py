"""Runs inside vLLM's processes: takes the agent's hooks away and puts them back, as it is told.

On the socket whose path is in its globals, ``path``, it first says which hooks it found. Then each
byte is an order, ``0`` or ``1``; the answer is how many seconds of CPU the agent's threads took.
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
        and method.__globals__.get("__name__", "").startswith("vllmops.agent.")
        and hasattr(method, "__wrapped__")
    ]


class Switch:
    """Stands before each hook, and leads to it or around it.

    Putting methods in and out instead would make Python forget what it knows of their classes, and
    run slower for a while each time.
    """

    def __init__(self, found: list[Hook]) -> None:
        self.on = True
        for cls, name, method in found:
            setattr(cls, name, self.either(method, method.__wrapped__))

    def either(self, hooked: Any, bare: Any) -> Any:
        @functools.wraps(hooked)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (hooked if self.on else bare)(*args, **kwargs)

        return call


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
                switch.on = order == b"1"
                teller.sendall(f"{cpu_seconds()}\n".encode())
        finally:
            for cls, name, method in found:
                setattr(cls, name, method)


if __name__ == "vllmops benchmark":
    obey(globals()["path"])
