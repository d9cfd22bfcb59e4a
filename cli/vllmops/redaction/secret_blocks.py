"""Secrets that go on over several lines: keys in files, blocks, values below their names."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

from .secret_names import Secrecy, classify_name
from .secret_positions import BELOW, is_plausible_secret
from .secret_values import strip_quotes
from .secret_words import find_labelled_secret, find_lone_secret

PEM = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY|^Private-Lines: \d+\s*$")
PEM_END = re.compile(r"-----END [A-Z0-9 ]{0,40}KEY")
PEM_BODY = re.compile(
    r"(?:\([\w.-]+ pid=\d+\) ?)?[\s|>\"']*"
    r"(?:[A-Za-z0-9+/=]{0,100}|(?:Proc-Type|DEK-Info|Comment|Version|Private-MAC)\b.*)[\s\"',\\]*"
)
PEM_LINES, PAIR_LINES, LINES_BEFORE, RECORD_LINES = 500, 3, 2, 20
BEGINS = (":", "=", "|", ">", "-", "+", "[", "{", ",", '"', "'", "]", "\\")
PARENT = re.compile(
    r"(?P<indent>[\s-]*)(?P<block>(?:variable|output)\s)?(?:[\"']?(?P<name>[\w.-]+)[\"']?\s*(?:[:=]|(?=\{))\s*(?:[!&][\w./-]+\s+)?"
    r"(?P<style>[|>][+-]?\d?|\"\"\"|'''|\[|\{|)|\[(?P<section>[\w.-]+)\])\s*$"
)
# What was asked for at a prompt: `>>> X`, `In [1]: X`, `(gdb) p X`, `(Pdb) X`.
PROMPT = r"(?:>>>|In \[\d+\]:|\([\w-]{2,20}\)) (?:(?:p|pp|print|echo|output)[ (])?"
# A line that ends with a name, behind a label at most: `- name: X`, `"Key": "X",`, `<dt>X</dt>`.
NAME_LINE = re.compile(
    rf"(?P<indent>\s*(?:[-#*] )?)(?:{PROMPT}(?:[\w.]{{1,60}}->)?)?(?:<\w+>)*[^\w\s]{{0,4}}"
    r"(?:(?i:[a-z_]{0,20}(?:name|key|id|type|var(?:iable)?|setting|parameter|field|option|property"
    r"|label|title)|k|td|dt|th)[\"']?\s{0,30}[:=>]+\s{0,4}[\"']?)?"
    r"(?P<name>[A-Za-z_][\w.-]{2,100}+)(?!,\s*$)"
    r"(?:[\"'\])`*_:,]|=>?|</\w+>){0,4}(?:\s\([\w ,.-]{1,40}\):?)?\s*\{?\s*$"
)
NAME_LINE_LENGTH = 160
BLOCK = re.compile(r"[|>][+-]?\d?\s*$")
FIELD = re.compile(r"\s*(?:- )?[\"']?[\w.-]+[\"']?\s*[:=]\s*([^\s{\[|>][^\n]*?),?\s*$")
DEFAULT = re.compile(r"\s*(?:default|value)\s*=\s*([^\s{\[][^\n]*?)\s*$")  # of Terraform's blocks
ANY_FIELD = re.compile(r"\s*[\"']?[\w.-]+[\"']?:\s+([^\s|>].*)$")
COMMENT = re.compile(r"\s*(?:#|//)")
# An option whose value is in the next line, as in a list or behind a backslash.
LAST_NAME = re.compile(
    r"(?:^|[\s\"'])(?:(?P<option>--[\w.-]++)[\"']?,?\s*+\\?"
    r"|(?P<field>[\w.-]++)\s?(?:=(?:\s?\\|\s*+)|:\s*+)"
    r"|\d+\) \"(?P<answer>[\w.-]+)\"$"  # redis-cli's
    r"|(?:cat|echo|printenv|head|get)\s(?:\S*[/${])?(?P<shown>[\w.-]+)\}?[\"']?)$"
)
SHOWS = re.compile(r"--|cat |echo |printenv |head |get ")
ITEM = re.compile(r"\s*(?:- |C: |\d+\) (?=\"))?[\"']?(?P<value>[^\s\"'-][^\s\"']*)")
KEY_BELOW = re.compile(r"\s*(?:- )?[\"']?[\w.-]+[\"']?\s*:(?:\s|$)")
# In a list of names and values, where the value stands first.
NAME_BELOW = re.compile(
    r"\s*<?[\"']?(?i:(?:parameter)?name|key)[\"']?\s*[:=>]\s*[\"']?(?P<name>[\w.-]+)[\"']?,?(?:</\w+>)?\s*$"
)
NEW_ITEM = re.compile(r"\s*(?:- |\{|\}|</?(?!name\b|key\b)|$)")
POINTER = re.compile(r"(?:\([\w.-]+ pid=\d+\) ?)?[\s│]*(?P<at>└) (?=\S)")
DRAWN = re.compile(r"(?:\([\w.-]+ pid=\d+\) ?)?[\s│]*│\s*$")
NAME_HERE = re.compile(r"[\w.]+")
DOCUMENT = re.compile(
    r"\b(?:cat|tee)\b.*<<-?\s?(?P<q>[\"']?)(?P<end>[A-Za-z_]{2,40})(?P=q)(?=\s*(?:$|>|\|))"
)
SAYS = re.compile(
    r"(?P<indent>\s*)(?:.{0,80}?\s)??(?P<before>[A-Za-z]{1,20}\s)?(?P<name>\w+)\s(?:is|was):\s*$"
)
ASKED = "UGFzc3dvcmQ6"  # Password:, as mail servers ask for it
FILE_PART = re.compile(r"[\w.-]+")
CODED_FIELD = re.compile(r"\s+[\"']?[\w.-]+[\"']?:\s+([\"']?[A-Za-z0-9+/]{4,}={0,2}[\"']?),?\s*$")


def find_value_above_name(line: str, following_lines: Iterable[str]) -> int | None:
    """Where the value begins of a name that stands in one of the lines after it."""
    match = BELOW.match(line)
    if not match:
        return None
    for following in following_lines:
        if NEW_ITEM.match(following):
            return None
        if name := NAME_BELOW.match(following):
            return match.end() if classify_name(name["name"]) >= Secrecy.LIKELY else None
    return None


def has_secret_file_name(line: str) -> bool:
    """Whether a command writes a file that has the name of a secret, or is in a folder of them."""
    return any(
        part == "secrets" or classify_name(part) >= Secrecy.LIKELY
        for part in FILE_PART.findall(line)
    )


class SecretBlockTracker:
    """Tells which lines are part of a secret that began in an earlier one."""

    def __init__(self) -> None:
        self.pem = 0  # lines that may still belong to a key
        self.end_pattern: re.Pattern[str] | None = None
        self.indent: int | None = None  # of the name whose value is a block below it
        self.is_all_secret = False  # of that block, also what looks like another name
        self.fields: tuple[int, re.Pattern[str]] | None = None  # indent above, and how they look
        self.record = 0  # lines that may still be of what a line has named
        self.record_secrecy = (
            0,
            Secrecy.NONE,
        )  # the indent of that line's fields, and what the name says
        self.previous_lines: deque[str] = deque(maxlen=LINES_BEFORE)
        self.lines = 0  # since what that ends began
        self.document = False  # whether that is a shell's, whose end is no secret
        self.code = ""  # the last line that no values are drawn below, or not yet
        self.last_ending: str | None = None  # what the line before ended with: an option, a field

    def find_secret_start(self, line: str, following_lines: Iterable[str] = ()) -> int | None:
        """From where a line is to be hidden, None where it is no part of a secret.

        Args:
            line: the line.
            following_lines: some of those that follow.
        """
        if self.is_in_private_key(line):
            return 0
        if self.end_pattern:
            self.lines += 1
            if self.end_pattern.search(line) or self.lines > PEM_LINES:
                self.end_pattern = None
                return None if self.document else 0
            return 0
        if (start := self.find_drawn_value(line)) is not None:
            return start
        start = self.find_value_below_name(line)
        if start is None:
            start = self.find_record_value(line)
        if start is None:
            start = find_lone_secret(line, self.previous_lines, following_lines)
        self.previous_lines.append(line)
        return self.find_indented_value(line) if start is None and line.strip() else start

    def find_drawn_value(self, line: str) -> int | None:
        """Where a value begins that a line of loguru or better-exceptions draws below its name."""
        match = POINTER.match(line) if "└ " in line else None
        if not match:
            if "│" not in line or not DRAWN.match(line):
                self.code = line
            return None
        name = NAME_HERE.match(self.code, match.start("at"))
        if name and classify_name(name[0]) >= Secrecy.LIKELY:
            return match.end()
        return None

    def is_in_private_key(self, line: str) -> bool:
        if not self.pem:
            return False
        ends = bool(PEM_END.search(line))
        inside = ends or bool(PEM_BODY.fullmatch(line))
        self.pem = self.pem - 1 if inside and not ends else 0
        return inside

    def find_value_below_name(self, line: str) -> int | None:
        """Where the value of a name in the line before begins."""
        if self.last_ending:
            match = ITEM.match(line)
            field = self.last_ending == "field" or (
                self.last_ending == "shown" and len(line.split()) > 1
            )
            if (
                field
                or self.last_ending in {"shown", "answer"}
                or not match
                or line.rstrip().endswith("\\")
            ):
                self.last_ending = None
            if match and (not field or is_plausible_secret(match["value"])):
                return match.start("value")
        return None

    def find_record_value(self, line: str) -> int | None:
        """Where a value begins in a line of what has been named: a thing's fields, a definition."""
        if not self.record or COMMENT.match(line):
            return None
        value = BELOW.match(line)
        indent, what = self.record_secrecy
        ends = not line.strip() or (not value and len(line) - len(line.lstrip()) < indent)
        self.record = 0 if ends else self.record - 1
        if value and not BLOCK.match(line, value.end()):
            return value.end()
        return None if ends else find_labelled_secret(line, what)

    def find_indented_value(self, line: str) -> int | None:
        """Where what stands in a block begins."""
        indent = len(line) - len(line.lstrip())
        if self.indent is not None:
            if indent > self.indent or (indent == self.indent and line[indent:].startswith("- ")):
                if self.is_all_secret or not KEY_BELOW.match(line):
                    return indent
            else:
                self.indent = None
        if self.fields:
            above, form = self.fields
            match = form.match(line)
            if indent <= above:
                self.fields = None
            elif match and (
                form is not FIELD
                or is_plausible_secret(strip_quotes(line, match.start(1), match.end(1)))
            ):
                return match.start(1)
        return None

    def note_block_start(self, line: str) -> None:
        """Look whether something begins in a line that goes on in the next."""
        if "PRIVATE KEY" in line or line.startswith("Private-Lines"):
            begin = PEM.search(line)
            if begin and not PEM_END.search(line, begin.end()) and "\\n" not in line:
                self.pem = PEM_LINES
                return
        if self.record and (match := BELOW.match(line)) and BLOCK.match(line, match.end()):
            self.indent, self.is_all_secret = len(line) - len(line.lstrip()), True
            return
        if "<<" in line and (match := DOCUMENT.search(line)) and has_secret_file_name(line):
            self.lines, self.end_pattern, self.document = (
                0,
                re.compile(rf"^\s*{match['end']}\s*$"),
                True,
            )
            return
        if (
            line.endswith(("is:", "was:"))
            and (said := SAYS.match(line))
            and classify_name(said["name"], said["before"] or "") is Secrecy.SECRET
        ):
            self.indent, self.is_all_secret = (
                len(said["indent"]),
                True,
            )  # it may go on in the next line
            return
        if line.rstrip().endswith(ASKED):
            self.last_ending = "answer"
            return
        name = NAME_LINE.match(line) if len(line) <= NAME_LINE_LENGTH else None
        if name and (what := classify_name(name["name"])) >= Secrecy.LIKELY:
            self.record, self.record_secrecy = RECORD_LINES, (len(name["indent"]), what)
        if not line.rstrip().endswith(BEGINS) and not SHOWS.search(line):
            return
        last = LAST_NAME.search(line)
        if last and (what := classify_name(last[last.lastgroup or 0])) >= Secrecy.LIKELY:
            self.last_ending = last.lastgroup if what is Secrecy.SECRET else "field"
        if match := PARENT.match(line):
            self.note_parent_name(match)

    def note_parent_name(self, match: re.Match[str]) -> None:
        """Look whether what stands below a name is secret."""
        name, style = match["name"] or match["section"], match["style"]
        indent = -1 if match["section"] else len(match["indent"])
        if match["section"]:
            self.fields = None
        if (what := classify_name(name)) >= Secrecy.LIKELY:
            if style == "[":
                self.lines, self.end_pattern, self.document = 0, re.compile(r"^\s*\]"), False
            elif style in {'"""', "'''"}:
                self.lines, self.end_pattern, self.document = 0, re.compile(style), False
            else:
                self.fields = indent, DEFAULT if match["block"] else FIELD
                certain = bool(style) or what is Secrecy.SECRET  # or a model's tokens
                if certain and style != "{" and not match["section"]:
                    self.indent = len(match["indent"].replace("-", " ").rstrip("\t"))
                    self.is_all_secret = bool(style)
        elif name in {"data", "binaryData"} and not style:
            self.fields = indent, CODED_FIELD
        elif name in {"stringData", "secureJsonData"} and not style:  # Kubernetes', Grafana's
            self.fields = indent, ANY_FIELD
