"""What a report without stacks says of a hang, by the table of ``prose.toml``."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from .prose import (
    HEADING,
    is_hang_report,
    load_report_tables,
    normalize_sentence,
    select_statements,
)

MOST = 3  # ids: more help nobody
FIRST = 10  # votes of a sign for the first of its ids; one for the others
STUCK, TITLE = 2, 3  # times as many in a sentence that says that something is stuck; in the title
COUNTED = 2  # sentences with a sign; one with a part's name
SHOWN = 200  # characters of a sentence


@dataclass(frozen=True)
class SentenceMatch:
    """What a sentence says of a hang.

    Args:
        id: of the catalogue.
        sentence: as it stands in the text.
        phase: as of `prose.HangPattern`.
    """

    id: str
    sentence: str
    phase: str


def match_sentences(text: str) -> list[SentenceMatch]:
    """What may be stuck, the most probable first.

    Args:
        text: a report without stacks.
    """
    sentences = {normalize_sentence(part): part for part in select_statements(text).split("\n\n")}
    weights = {
        words: 1 if not is_hang_report(part) else TITLE if HEADING.match(part) else STUCK
        for words, part in sentences.items()
    }
    stuck = max(weights.values()) > 1
    votes: Counter[str] = Counter()
    said: dict[str, SentenceMatch] = {}
    weak = True  # as long as only names of parts were found
    for sign in load_report_tables().sign:
        if not (stuck or sign.proof) or (sign.part and votes and not weak):
            continue
        matching = filter(re.compile(sign.pattern).search, sentences)
        best = sorted(matching, key=weights.__getitem__, reverse=True)[
            : 1 if sign.part else COUNTED
        ]
        if best:
            weak = sign.part
            weight = sum(map(weights.__getitem__, best))
            for index, name in enumerate(sign.ids):
                votes[name] += weight * (1 if index else FIRST)
                sentence = " ".join(sentences[best[0]].split())[:SHOWN].lstrip("-*>#| ")
                said.setdefault(name, SentenceMatch(name, sentence, "" if index else sign.phase))
    return [said[name] for name, _ in votes.most_common(MOST)]
