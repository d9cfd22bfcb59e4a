"""Secrets in tables, named by a line above them or in each row: CSV, Markdown, a database's."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .secret_names import Secrecy, classify_name
from .secret_values import HASH, is_generated, strip_quotes

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
# The columns of a table that has a name and its value in each row.
OF_NAMES = {"name", "key", "variable", "parameter", "setting", "option", "property", "field"}
OF_VALUES = {"value", "val", "content"}


INSERT = re.compile(
    r"(?i)\binsert\s+(?:ignore\s+)?into\s+[\w.`\"\[\]]+\s*\((?P<names>[^()]{1,2000})\)\s*values\s*(?=\()"
)
SQL_VALUE = re.compile(
    r"\s*(?:'(?:[^']|'')*'|\"[^\"]*\"|[^,()'\"]+(?:\([^()]*\))?)\s*(?P<end>[,)])"
)


def find_sql_values(line: str) -> Iterator[tuple[int, int]]:
    """Where secrets stand in the values of an SQL statement that names its columns."""
    if not (match := INSERT.search(line)):
        return
    kinds = [classify_name(name.strip(' `"[]')) for name in match["names"].split(",")]
    at, number = match.end() + 1, 0
    while value := SQL_VALUE.match(line, at):
        at = value.end()
        start = value.start() + len(value[0]) - len(value[0].lstrip())
        if number < len(kinds) and kinds[number] is Secrecy.SECRET:
            yield start, value.start("end")
        number += 1
        if value["end"] == ")":
            following = re.compile(r"\s*,\s*\(").match(line, at)
            if not following:
                return
            at, number = following.end(), 0


class SecretColumnTracker:
    """Tells where secrets stand in the rows of a table, once a line has named its columns."""

    def __init__(self) -> None:
        self.separator = ""
        self.count = 0
        self.secret: dict[int, Secrecy] = {}
        self.pair: tuple[int, int] | None = None  # the columns of names and of their values
        self.rows = 0

    def find_secrets(self, line: str) -> Iterator[tuple[int, int]]:
        """The places of the secrets in a line."""
        if (self.secret or self.pair) and not RULE.fullmatch(line):
            found = find_field_spans(line, self.separator)
            if len(found) == self.count and self.rows:
                self.rows -= 1
                for number, what in (self.secret or self.find_named_column(line, found)).items():
                    start, end = found[number]
                    value = strip_quotes(line, start, end)
                    if what is Secrecy.SECRET or is_random_value(value):
                        yield start, end
                return
            self.secret, self.pair = {}, None
        if not (self.secret or self.pair) and HEADER.fullmatch(line):
            self.parse_header(line)

    def find_named_column(
        self, line: str, field_spans: list[tuple[int, int]]
    ) -> dict[int, Secrecy]:
        """The column of a row that holds a secret, by the name in the row."""
        if not self.pair:
            return {}
        name, value = self.pair
        what = classify_name(strip_quotes(line, *field_spans[name]))
        return {value: what} if what >= Secrecy.LIKELY else {}

    def parse_header(self, line: str) -> None:
        """Take a line for the names of columns, if it can be."""
        for sign in FIELDS:
            if sign not in line:
                continue
            found = find_field_spans(line, sign)
            names = [line[start:end] for start, end in found]
            if len(names) > 1 and all(NAME.fullmatch(name) for name in names if name):
                names = [name.strip("#\"' ") for name in names]
                kinds = [classify_name(name.replace(" ", "_")) for name in names]
                secret = {n: what for n, what in enumerate(kinds) if what >= Secrecy.LIKELY}
                self.pair = find_name_value_columns([name.lower() for name in names])
                self.separator, self.count, self.secret = (
                    sign,
                    len(names),
                    {} if self.pair else secret,
                )
                self.rows = MOST_ROWS
                return


def find_name_value_columns(names: list[str]) -> tuple[int, int] | None:
    """Which column is of names, and which of their values, by the names of all columns."""
    for number, name in enumerate(names):
        if name in OF_NAMES:
            for other in range(number + 1, len(names)):
                if names[other] in OF_VALUES:
                    return number, other
    return None


def is_random_value(value: str) -> bool:
    """Whether a value is none that a model's token has."""
    return bool(is_generated(value) or HASH.fullmatch(value) or MIXED.match(value))


def find_field_spans(line: str, separator: str) -> list[tuple[int, int]]:
    """Where the fields of a row stand, without the spaces around them."""
    found = []
    for match in FIELDS[separator].finditer(line):
        text = match[0].removesuffix(separator)
        if match.end() == match.start():
            break
        start = match.start() + len(text) - len(text.lstrip())
        found.append((start, max(start, match.start() + len(text.rstrip()))))
    return found
