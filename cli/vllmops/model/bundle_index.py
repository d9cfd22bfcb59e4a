"""The index of a bundle."""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA = 1


class BundlePart(msgspec.Struct, frozen=True):
    """A file in a bundle.

    Args:
        name: its name.
        bytes: its size.
        seconds: how long it took to capture.
        description: what it holds.
        process: whose, such as ``worker TP1``; empty for the whole server.
    """

    name: str
    bytes: int
    seconds: float
    description: str = msgspec.field(name="about")
    process: str = ""


class BundleGap(msgspec.Struct, frozen=True):
    """Something that could not be captured, or only in part.

    Args:
        name: the part's.
        reason: in words.
    """

    name: str
    reason: str = msgspec.field(name="why")


class BundleIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The table of contents.

    Args:
        schema: of this type, and of what a bundle holds.
        made_at: when capturing began, in seconds since the epoch.
        seconds: how long it took.
        vllmops: the version that made it.
        server: the server's name, or the pid of its first process.
        redacted: whether secrets and prompts were removed.
        interrupted: whether somebody interrupted the capture.
        parts: in their order in the archive.
        missing: what is not there, and why.
        redactions: how many things were removed, by kind.
        note: what a reader must know before sharing it.
    """

    kind: Literal["bundle"] = "bundle"
    schema: int = SCHEMA
    made_at: float
    seconds: float
    vllmops: str
    server: str
    redacted: bool
    interrupted: bool = False
    parts: tuple[BundlePart, ...] = ()
    missing: tuple[BundleGap, ...] = ()
    redactions: dict[str, int] = {}
    note: str = ""
