"""Messages that ended a thread of an engine, whole or without what users wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ..collect.agents import agent_client
from ..model.fatal_messages import FatalMessage
from ..model.ranks import format_role_and_ranks
from ..model.roles import Role
from ..servers.discovery import Server

# A message's own fields are named so deep, among them those of its sampling parameters.
NAMES_DEEP, NAME = 3, re.compile(r"[a-z_]{1,40}")
ITEMS = 100


class ProcessFatalMessage(FatalMessage, frozen=True, kw_only=True):
    """One of a process.

    Args:
        process: for a person.
        shapes: of each frame that is whole, what is left of it without texts and tokens.
    """

    process: str
    shapes: tuple[Any, ...] = ()


def fetch_fatal_messages(server: Server) -> list[ProcessFatalMessage]:
    """Those that the engines of a server have kept; none where an agent does not answer."""
    asked = server.select_processes(Role.ENGINE)
    answers, _ = agent_client.collect_answers(
        asked, lambda process: agent_client.open_agent(process).fetch_fatal_messages()
    )
    return [
        ProcessFatalMessage(
            process=f"{format_role_and_ranks(answer.role, answer)} {answer.pid}",
            **msgspec.structs.asdict(one),
        )
        for answer in answers
        for one in answer.messages
    ]


def redact_messages(messages: Sequence[ProcessFatalMessage]) -> Iterator[ProcessFatalMessage]:
    """Messages with the shape of what they hold in its place."""
    for one in messages:
        shapes = tuple(
            describe_frame(frame.head) if len(frame.head) == frame.size else "cut off"
            for frame in one.frames
        )
        frames = tuple(msgspec.structs.replace(frame, head=b"") for frame in one.frames)
        yield msgspec.structs.replace(one, frames=frames, shapes=shapes)


def describe_frame(content: bytes) -> Any:
    """The shape of a frame."""
    try:
        return describe_shape(msgspec.msgpack.decode(content))
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return "no msgpack"


def describe_shape(value: Any, depth: int = 0) -> Any:
    """What a value is made of: numbers and names of fields stay, texts and tokens do not."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        names = [key if isinstance(key, str) and NAME.fullmatch(key) else "" for key in value]
        if depth >= NAMES_DEEP or not all(names):
            return f"map of {len(value)}"
        return {
            name: describe_shape(item, depth + 1)
            for name, item in zip(names, value.values(), strict=True)
        }
    if isinstance(value, list):
        if value and all(isinstance(item, int | float) for item in value):
            return f"{len(value)} numbers"
        return [describe_shape(item, depth + 1) for item in value[:ITEMS]]
    size = len(value) if isinstance(value, str | bytes) else len(getattr(value, "data", b""))
    return f"{type(value).__name__} of {size}"
