"""What a report without stacks says of a hang, by the table of ``signs.toml``."""

from __future__ import annotations

import functools
import re
from collections import Counter

import msgspec

from . import toml
from .prose import STUCK, reported

MOST = 3  # ids: more help nobody
FIRST = 10  # votes of a sign for the first of its ids; one for the others
LONGEST = 2000  # characters of a sentence
SHOWN = 200  # characters of a sentence
MARKUP = re.compile(r"[`*]")


class Sign(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Words that tell what is stuck; see the head of the file.

    Args:
        words: pattern for the report in lower case.
        ids: of the catalogue, the most probable first.
        example: a report that has the sign.
        proof: whether the words alone say that something is stuck.
    """

    words: str
    ids: tuple[str, ...]
    example: str
    proof: bool = False


class Signs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file."""

    sign: tuple[Sign, ...]


@functools.cache
def table() -> tuple[Sign, ...]:
    """The signs, in the order of the file."""
    return toml.read("signs.toml", Signs).sign


def read(text: str) -> dict[str, str]:
    """What may be stuck, the most probable first, with the sentence that says so.

    Args:
        text: a report without stacks.
    """
    report = reported(text)
    stuck = STUCK.search(report) is not None
    votes: Counter[str] = Counter()
    found: dict[str, str] = {}
    sentences = [" ".join(MARKUP.sub("", part).split())[:LONGEST] for part in report.split("\n\n")]
    lower = [sentence.lower() for sentence in sentences]
    for sign in table():
        if not (stuck or sign.proof):
            continue
        search = re.compile(sign.words).search
        at = next((at for at, sentence in enumerate(lower) if search(sentence)), None)
        if at is not None:
            for index, name in enumerate(sign.ids):
                votes[name] += 1 if index else FIRST
                found.setdefault(name, sentences[at][:SHOWN])
    return {name: found[name] for name, _ in votes.most_common(MOST)}
