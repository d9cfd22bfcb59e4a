"""What a report without stacks says of a hang, by the table of ``signs.toml``."""

from __future__ import annotations

import re
from collections import Counter

from .prose import is_stuck, plain, reported, table

MOST = 3  # ids: more help nobody
FIRST = 10  # votes of a sign for the first of its ids; one for the others
SHOWN = 200  # characters of a sentence


def read(text: str) -> dict[str, str]:
    """What may be stuck, the most probable first, with the sentence that says so.

    Args:
        text: a report without stacks.
    """
    report = reported(text)
    stuck = is_stuck(report)
    sentences = {plain(part): part for part in report.split("\n\n")}
    votes: Counter[str] = Counter()
    found: dict[str, str] = {}
    weak = True  # as long as only names of parts were found
    for sign in table().sign:
        if not (stuck or sign.proof) or (sign.part and votes and not weak):
            continue
        search = re.compile(sign.words).search
        if match := next(filter(search, sentences), ""):
            weak = sign.part
            for index, name in enumerate(sign.ids):
                votes[name] += 1 if index else FIRST
                found.setdefault(name, " ".join(sentences[match].split())[:SHOWN])
    return {name: found[name] for name, _ in votes.most_common(MOST)}
