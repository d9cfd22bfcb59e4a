"""Conversations that clients carry: what sealing and opening them takes, and how long they are."""

from __future__ import annotations

import base64
import json
import random
import re
import secrets
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from vllmops_responses.keys import carrier
from vllmops_responses.keys.keyring import KeyRing, generate_secret, make_single_key_ring
from vllmops_responses.server.carriers import compaction

from .figure import Figure, Limit, interleave_measurements, make_paired_figure
from .setting import Setting

MODEL, OWNER = "demo", "0" * 64
LARGE, TURNS = 1_000_000, 10
WORDS = "the quick brown fox jumps over a lazy dog and runs far away from its own long shadow"


def measure(setting: Setting) -> Iterator[Figure]:
    ring, rounds = make_single_key_ring(generate_secret()), 4 if setting.short else 40
    long = history(LARGE)
    opened, sealed = partial(unseal, ring), partial(seal, ring)
    yield compare_seconds(
        "seal 1 MB", rounds, partial(sealed, long), partial(raw_seal, long), setting
    )
    text, raw = sealed(long), raw_seal(long)
    yield compare_seconds(
        "open 1 MB", rounds, partial(opened, text), partial(raw_open, raw), setting
    )
    left = partial(sealed_compaction, ring, long)
    name = "seal a compaction that leaves 1 MB"
    yield compare_seconds(
        name, rounds, left, partial(sealed, long), setting, "a carrier of 1 MB", 1.05
    )
    short = history(TURNS * 1_000)

    def turn() -> None:
        opened(sealed(short))

    times = interleave_measurements(
        rounds, {"turn": partial(seconds, turn), "nothing": partial(seconds, int)}
    )
    yield Figure(
        f"what a turn pays, after {TURNS} turns of 1 KB",
        "s",
        statistics.median(times["turn"]),
        "nothing",
        statistics.median(times["nothing"]),
        Limit(1, 0.006 if setting.short else 0.002),
        rounds,
    )
    signed = carrier.sign_history(long, ring)
    name = "length of a carrier of 1 MB of text"
    yield Figure(name, "bytes", len(text), "format 1", len(signed), Limit(0.5), 1)


def history(size: int) -> list[Any]:
    """Messages of some KB, of `size` bytes as JSON or a little more."""
    choice, made, so_far = random.Random(1), list[Any](), 0
    while so_far < size:
        text = " ".join(choice.choices(WORDS.split(), k=150))
        made.append({"type": "message", "role": "user", "content": text})
        so_far += len(json.dumps(made[-1]))
    return made


def seal(ring: KeyRing, items: list[Any]) -> str:
    return carrier.seal_history(items, ring, model=MODEL, owner=OWNER)


def sealed_compaction(ring: KeyRing, items: list[Any]) -> str:
    return seal(ring, compaction.build_compacted_items(items, "summary"))


def unseal(ring: KeyRing, text: str) -> object:
    return carrier.unseal_carrier(text, ring, model=MODEL, owner=OWNER)


KEY, NONCE = AESGCM(secrets.token_bytes(32)), secrets.token_bytes(12)


def raw_seal(items: list[Any]) -> bytes:
    """What any sealing does that compresses each item by itself."""
    stream, text = zlib.compressobj(carrier.LEVEL), json.dumps(items, separators=(",", ":"))
    packed = b"".join(
        stream.compress(part) + stream.flush(zlib.Z_FULL_FLUSH)
        for part in re.split(rb"(?<=},)", text.encode())
    )
    return base64.urlsafe_b64encode(KEY.encrypt(NONCE, packed + stream.flush(), b""))


def raw_open(text: bytes) -> Any:
    """What any opening does."""
    return json.loads(zlib.decompress(KEY.decrypt(NONCE, base64.urlsafe_b64decode(text), b"")))


def compare_seconds(
    name: str,
    rounds: int,
    ours: Callable[[], object],
    raw: Callable[[], object],
    setting: Setting,
    rival: str = "json, zlib, AES-GCM and base64",
    most: float = 1.5,
) -> Figure:
    times = interleave_measurements(
        rounds, {"ours": partial(seconds, ours), "raw": partial(seconds, raw)}
    )
    return make_paired_figure(name, times["ours"], rival, times["raw"], most, short=setting.short)


def seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
