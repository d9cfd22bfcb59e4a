"""Secrets in tables, whose names stand in a line above them: CSV, Markdown, a database's."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .secretnames import Kind, kind
from .secretvalues import HASH, generated, inside

# What stands between two fields, and a field of each kind.
FIELDS = {
    "\t": re.compile(r"(?:\"(?:[^\"]|\"\")*\"|[^\t]*)(?:\t|$)"),
    "|": re.compile(r"[^|]*(?:\||$)"),
    ";": re.compile(r"(?:\"(?:[^\"]|\"\")*\"|[^;]*)(?:;|$)"),
    ",": re.compile(r"(?:\"(?:[^\"]|\"\")*\"|[^,]*)(?:,|$)"),
    "  ": re.compile(r"\s*+\S++(?: \S++)*+\s*+"),
}
HEADER = re.compile(r"#?[\s\"'|;,\w.-]{5,1000}")
NAME = re.compile(r"(?:# ?)?[\"']?[A-Za-z][\w.-]*(?: [\w.-]+){0,2}[\"']?")
RULE = re.compile(r"[\s|+:=-]+")
MIXED = re.compile(r"(?=.*\d)(?=.*[a-z])(?=.*[A-Z]).{8,}")
MOST_ROWS = 100_000


class Columns:
    """Tells where secrets stand in the rows of a table, once a line has named its columns."""

    def __init__(self) -> None:
        self.sign = ""
        self.count = 0
        self.secret: dict[int, Kind] = {}
        self.rows = 0

    def secrets(self, line: str) -> Iterator[tuple[int, int]]:
        """The places of the secrets in a line."""
        if self.secret and not RULE.fullmatch(line):
            found = fields(line, self.sign)
            if len(found) == self.count and self.rows:
                self.rows -= 1
                for number, what in self.secret.items():
                    start, end = found[number]
                    value = inside(line, start, end)
                    if what is Kind.SECRET or odd(value):
                        yield start, end
                return
            self.secret = {}
        if not self.secret and HEADER.fullmatch(line):
            self.begin(line)

    def begin(self, line: str) -> None:
        """Take a line for the names of columns, if it can be."""
        for sign in FIELDS:
            if sign not in line:
                continue
            found = fields(line, sign)
            names = [line[start:end] for start, end in found]
            if len(names) > 1 and all(NAME.fullmatch(name) for name in names if name):
                kinds = [kind(name.strip("#\"' ").replace(" ", "_")) for name in names]
                secret = {n: what for n, what in enumerate(kinds) if what >= Kind.LIKELY}
                self.sign, self.count, self.secret = sign, len(names), secret
                self.rows = MOST_ROWS
                return


def odd(value: str) -> bool:
    """Whether a value is none that a model's token has."""
    return bool(generated(value) or HASH.fullmatch(value) or MIXED.match(value))


def fields(line: str, sign: str) -> list[tuple[int, int]]:
    """Where the fields of a row stand, without the spaces around them."""
    found = []
    for match in FIELDS[sign].finditer(line):
        text = match[0].removesuffix(sign)
        if match.end() == match.start():
            break
        start = match.start() + len(text) - len(text.lstrip())
        found.append((start, max(start, match.start() + len(text.rstrip()))))
    return found
