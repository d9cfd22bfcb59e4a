"""Takes secrets and prompts out of what leaves the machine.

Two nets: what is known to be secret, from the server's environment and arguments, is taken out
wherever it stands; what looks like a secret, by the name before it (`secretnames`) or by its form
(`secretforms`), is taken out, too. Hashes stay: the keys of caches are some. Pure: text in, text
out; line by line, so that a long log costs no more memory than a short one.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from . import said
from .loglines import Lines
from .secretforms import FORMS, MARK
from .secretnames import STEMS, Kind, kind
from .secretvalues import (
    CLOSING,
    CODE,
    LEAST,
    NOTHING,
    OPENING,
    QUOTE,
    QUOTES,
    RUN,
    inside,
    looks_secret,
    random,
    value_end,
    written,
)

__all__ = ["MARK", "Redactor", "secrets"]

LINE = 32 << 10  # characters of a line; what is behind them is left out
CUT = "[the rest of the line is left out]"
CODED = 2  # how often what is coded in URLs or in base64 is decoded again
TEXT = 1 << 20  # characters of a text that is looked through for values
SEEN = 300  # characters of a value whose name says little

HINTS = tuple((has, form) for form in FORMS for has in form.has)
# Environment variables whose values tell how a server runs, and not with what rights.
ALLOWED = re.compile(
    r"(?:VLLM|VLLMOPS|CUDA|NVIDIA|NCCL|TORCH\w*|PYTORCH|TRITON|OMP|MKL|KMP|GOMP|HIP|ROCR|ROCM|RCCL"
    r"|HSA|RAY|FLASHINFER|GLOO|UCX|TRANSFORMERS|TOKENIZERS|HF_HUB|PYTHON\w*|MALLOC|MIMALLOC)_\w+"
    r"|PYTHON[A-Z]+|PATH|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|CONDA_PREFIX|HF_HOME|LANG|LC_ALL|TZ"
)
RANDOM = re.compile(r"(?=[^\s/:,;@]*\d)(?=[^\s/:,;@]*[A-Za-z])[A-Za-z0-9+=_\-~%]{20,}")
ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.MULTILINE)
# Options whose whole value is nobody else's business, though other names that end so say less.
PRIVATE_OPTION = re.compile(r"--?(?:token|pass|(?:[\w-]+-)?exec)")
LOGIN_OPTIONS = {"-u", "--user", "-U", "--proxy-user", "--auth", "--basic-auth"}

# A name and what stands between it and its value, in code, JSON, headers, queries, tables.
NAMED = re.compile(
    r"(?<![\w.$-])(?P<name>[\w.$-]++)"
    rf"(?P<sign>{QUOTE}?\]?[ \t]{{0,4}}(?:=>|:=|=(?!=)|:(?![:/]))\s{{0,4}}(?:(?:!!?|&)\w+\s+)?"
    rf"|{QUOTE}\s?,\s?(?=[bru]?{QUOTE})|[ \t]{{1,40}}(?:[|\u2502\u2192]|->)[ \t]{{1,4}})(?=\S)"
)
BEFORE = re.compile(r"(?<![\w.-])((?:[A-Za-z]{1,20}[ -]){1,2})$")
BEFORE_LENGTH = 42
OPTION = re.compile(
    r"(?<![\w-])(?:--?(?P<name>[A-Za-z][\w.-]*+)"
    r"|(?:(?:ENV|ARG|setenv|set -\w{1,3}|con\w+ set) |&)(?P<variable>[\w.-]++))"
    r"[ \t]+(?=[^\s|&;>\\-])"
)
HEADER = re.compile(r"(?i:(?:proxy-)?authorization|(?:set-)?cookie)$")
# In sentences: with password "…", API key … is not valid.
SENTENCE = re.compile(
    r"(?<![\w.-])(?P<name>(?i:(?:(?:secret|access|api|private|auth(?:entication|orization)?|bearer"
    r"|admin|session|refresh|signing|license|account|hub|security|master|service|client|encryption"
    r"|shared|user(?:name)?|db|database|root|aws)[ _/-]?){0,3}"
    r"(?:keys?|tokens?|secrets?|passwords?|passwd|passphrase|passcode|pwd|credentials?|pin|otp"
    r"|(?:access |secret )key id|community string|community)))"
    r"(?:\s+(?i:is|are|was|set|to|of|provided|given|supplied|received|used|value|with|named|from"
    r"|header|pair|(?:mismatch|rejected|refused|invalid|expired|wrong|incorrect|denied|revoked"
    r"|unknown|not \w+)(?=[: (]))|\s\[(?:None|\*+\w*)\]|\s+for\s+[^\s:]{1,60}(?=[\s:])){0,3}"
    rf"(?:\s*[:=]?\s+|\s*[(\[])(?P<quote>[bru]?{QUOTE})?(?=[^\s])"
)
# What follows a secret, and may be one more: a key in a list, a word behind an option.
ANOTHER = re.compile(
    r"(?:,? (?:and|or|but got|got|instead of|!=|/|vs\.?) |\s?,\s?)(?=\S)"
)
ANOTHER_WORD = re.compile(r"[ \t]+(?=[^\s|&;>\\-])")
PART = re.compile(r"(?<=[\"'])[^\"'\s]++(?=[\"'])")
SIGN = re.compile(r"^[\w-]+[=:]")
REFUSED = re.compile(
    r"[\"'`)]?,? (?:which |that |it )?(?:is|was|has|isn't|wasn't|does|did)? ?"
    r"(?:not (?:a )?(?:valid|correct|accepted|known|found"
    r"|allowed|authorized|match)|invalid|wrong|incorrect|expired|rejected|denied|revoked|unknown)"
)
PAIR = re.compile(
    rf"(?i)\b(?:name|key){QUOTE}?\s{{0,4}}[:=]\s{{0,4}}{QUOTE}?(?P<name>[\w.-]++){QUOTE}?\s{{0,4}},?\s{{0,4}}"
    rf"(?:{QUOTE}?value{QUOTE}?\s{{0,4}}[:=]\s{{0,4}}(?=\S)|(?P<below>$))"
)
TAG = re.compile(r"<(?P<name>[\w:.-]++)(?:\s[^<>]{0,200})?>(?=[^<\s])")
BELOW = re.compile(rf"^\s*(?:- )?{QUOTE}?value{QUOTE}?\s*[:=]\s*(?=\S)", re.IGNORECASE)
# A word as people write it unquoted; what may end it is part of it, where nothing follows.
BARE = re.compile(
    r"(?:[^\s\"'<>`&,;\\]|,(?!\s|$)|&(?![\w.-]+=|$)|;(?!\s|$|[\w ]{1,40}=)|\\(?![\"'nrt\\]))+"
)
LINE_START = re.compile(r"[\s-]*(?:export )?[\"']?$")
CODED_RUN = re.compile(r"[A-Za-z0-9+/_-]{16,}+={0,2}")
PERCENT = re.compile(r"[^\s\"'<>]++")
ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")

# What goes on over several lines.
PEM = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY|^Private-Lines: \d+\s*$")
PEM_END = re.compile(r"-----END [A-Z0-9 ]{0,40}KEY")
PEM_BODY = re.compile(
    r"(?:\([\w.-]+ pid=\d+\) ?)?[\s|>\"']*"
    r"(?:[A-Za-z0-9+/=]{0,100}|(?:Proc-Type|DEK-Info|Comment|Version|Private-MAC)\b.*)[\s\"',\\]*"
)
PEM_LINES = 500
BEGINS = (":", "|", ">", "-", "+", '"""', "'''", "[", "{", ",", '"', "'", "]")
PARENT = re.compile(
    r"(?P<indent>[\s-]*)(?:[\"']?(?P<name>[\w.-]+)[\"']?\s*[:=]\s*(?:[!&][\w./-]+\s+)?"
    r"(?P<style>[|>][+-]?\d?|\"\"\"|'''|\[|\{|)|\[(?P<section>[\w.-]+)\])\s*$"
)
FIELD = re.compile(r"\s*[\"']?[\w.-]+[\"']?\s*[:=]\s*(?P<value>[^\s{\[|>][^\n]*?),?\s*$")
ANY_FIELD = re.compile(r"\s*[\"']?[\w.-]+[\"']?:\s+(?P<value>[^\s|>].*)$")
COMMENT = re.compile(r"\s*(?:#|//)")
# An option whose value is in the next line, as in a list or behind a backslash.
LAST_OPTION = re.compile(r"(?:^|[\s\"'])(?P<name>--[\w.-]+)[\"']?,?\s*\\?$")
ITEM = re.compile(r"\s*(?:- )?[\"']?(?P<value>[^\s\"'-][^\s\"']*)")
KEY_BELOW = re.compile(r"\s*(?:- )?[\"']?[\w.-]+[\"']?\s*:(?:\s|$)")
CHILD = re.compile(
    r"(?P<keep>\s+[\"']?[\w.-]+[\"']?:\s+)(?P<value>[\"']?[A-Za-z0-9+/]{4,}={0,2}[\"']?),?\s*$"
)


class Blocks:
    """Tells which lines are part of a secret that began in an earlier one."""

    def __init__(self) -> None:
        self.pem = 0  # lines that may still belong to a key
        self.until: re.Pattern[str] | None = None
        self.indent = -1
        self.all = False
        self.data: int | None = None
        self.child = CHILD
        self.pair = False
        self.option = False

    def hidden(self, line: str) -> int | None:
        """From where a line is to be hidden, None where it is no part of a secret."""
        if self.pem:
            self.pem -= 1
            ends = bool(PEM_END.search(line))
            if ends or PEM_BODY.fullmatch(line):
                self.pem = 0 if ends else self.pem
                return 0
            self.pem = 0
        if self.until:
            if self.until.search(line):
                self.until = None
            return 0
        if self.pair and not COMMENT.match(line):
            self.pair = False
            if match := BELOW.match(line):
                return match.end()
        if self.option:
            match = ITEM.match(line)
            self.option = bool(match) and not line.rstrip().endswith("\\")
            if match:
                return match.start("value")
        indent = len(line) - len(line.lstrip())
        if self.indent >= 0 and line.strip():
            if indent > self.indent or (indent == self.indent and line[indent:].startswith("- ")):
                if self.all or not KEY_BELOW.match(line):
                    return indent
            else:
                self.indent = -1
        if self.data is not None and line.strip():
            if indent <= self.data:
                self.data = None
            elif (match := self.child.match(line)) and (
                self.child is not FIELD or mixed(inside(line, match.start("value"), match.end()))
            ):
                return match.start("value")
        return None

    def begin(self, line: str) -> None:
        """Look whether something begins in a line that goes on in the next."""
        if "PRIVATE KEY" in line or line.startswith("Private-Lines"):
            begin = PEM.search(line)
            if begin and not PEM_END.search(line, begin.end()) and "\\n" not in line:
                self.pem = PEM_LINES
                return
        if "-" in line and (option := LAST_OPTION.search(line)):
            self.option = kind(option["name"]) is Kind.SECRET
        if not line.rstrip().endswith(BEGINS) and "ame" not in line:
            return
        if match := PARENT.match(line):
            name, style = match["name"] or match["section"], match["style"]
            if match["section"]:
                self.data = None
            if kind(name) >= Kind.LIKELY or name == "tokens":
                if style == "{" or match["section"]:
                    self.data, self.child = len(match["indent"]) - bool(match["section"]), FIELD
                elif style in {'"""', "'''"}:
                    self.until = re.compile(style)
                elif style == "[":
                    self.until = re.compile(r"^\s*\]")
                else:
                    self.indent = len(match["indent"].replace("-", " ").rstrip("\t"))
                    self.all = bool(style)
                    self.data, self.child = len(match["indent"]), FIELD
            elif name in {"data", "stringData", "binaryData"} and not style:
                self.data = len(match["indent"])
                self.child = ANY_FIELD if name == "stringData" else CHILD
        elif (pair := PAIR.search(line)) and pair["below"] is not None:
            self.pair = kind(pair["name"]) >= Kind.LIKELY


class Redactor:
    """Redacts, and counts what it has taken out, by kind.

    Args:
        secrets: known ones, taken out wherever they stand.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self.counts: Counter[str] = Counter()
        forms = {form for secret in secrets for form in written(secret)}
        every = "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
        self.known = re.compile(every) if every else None

    def text(self, text: str) -> str:
        """A text without secrets; prompts stay, see `log`."""
        return "\n".join(self.lines(text.split("\n")))

    def log(self, text: str) -> str:
        """A log without secrets, prompts and answers."""
        return "\n".join(self.log_lines(text.split("\n")))

    def tail(self, text: str) -> str:
        """A server's log as `log`, and without what anybody may have written in it."""
        return "\n".join(self.tail_lines(text.split("\n")))

    def lines(self, lines: Iterable[str]) -> Iterator[str]:
        """Lines as `text`, one by one."""
        blocks = Blocks()
        for line in map(self.literal, self.whole(lines)):
            start = blocks.hidden(line)
            if start is None:
                blocks.begin(line)
                yield self.line(line)
            elif NOTHING.match(line, start) or not line[start:]:
                yield line
            else:
                self.counts["secret of several lines"] += 1
                yield line[:start] + MARK

    def log_lines(self, lines: Iterable[str]) -> Iterator[str]:
        """Lines as `log`, one by one."""
        return said.without(self.lines(lines), self.counts)

    def tail_lines(self, lines: Iterable[str]) -> Iterator[str]:
        """Lines as `tail`, one by one."""
        known = Lines()
        for line in self.log_lines(lines):
            kept = known.kept(line)
            if kept < len(line) and line[kept:] != MARK:
                self.counts["log line of no known form"] += 1
                yield line[:kept] + MARK
            else:
                yield line

    def whole(self, lines: Iterable[str]) -> Iterator[str]:
        """Lines of a bounded length: what is longer is cut off before a word."""
        for line in lines:
            if len(line) <= LINE:
                yield line
            else:
                self.counts["long line"] += 1
                head = self.literal(line)[:LINE].rpartition(" ")[0]
                yield f"{head} {CUT}"

    def line(self, line: str, coded: int = CODED) -> str:
        """A line without secrets, what is known to be one excepted."""
        if len(line) < LEAST:
            return line
        low = line.lower()
        for form in dict.fromkeys(form for has, form in HINTS if has in low):
            line = self.counted(form.name, form.pattern, line)
        if any(stem in low for stem in STEMS):
            line = self.named(line)
        line = RUN.sub(self.run, line)
        if coded:
            if "%" in line:
                line = PERCENT.sub(lambda match: self.unquoted(match[0], coded - 1), line)
            line = CODED_RUN.sub(lambda match: self.decoded(match[0], coded - 1), line)
        return line

    def run(self, match: re.Match[str]) -> str:
        """A run of characters, unless nobody can have written it."""
        if not random(match[0]):
            return match[0]
        self.counts["random text"] += 1
        return MARK

    def unquoted(self, word: str, coded: int) -> str:
        """A word that is coded as in URLs: as it is, or without its secrets."""
        if not ESCAPE.search(word):
            return word
        plain = unquote(word)
        told = self.line(plain, coded)
        return word if told == plain else told

    def decoded(self, word: str, coded: int) -> str:
        """A word of base64's letters: as it is, or nothing of it, if there are secrets in it."""
        try:
            content = base64.b64decode(word.rstrip("=").translate({45: "+", 95: "/"}) + "==")
            plain = content.decode("ascii")
        except (binascii.Error, ValueError):
            return word
        if not all(letter.isprintable() or letter.isspace() for letter in plain):
            return word
        redactor = Redactor()
        redactor.known = self.known
        if "\n".join(redactor.literal(redactor.line(x, coded)) for x in plain.split("\n")) == plain:
            return word
        self.counts["secret in base64"] += 1
        return MARK

    def counted(self, kind: str, form: re.Pattern[str], text: str) -> str:
        with_kept = "keep" in form.groupindex
        text, count = form.subn(rf"\g<keep>{MARK}" if with_kept else MARK, text)
        self.counts[kind] += count
        return text

    def literal(self, text: str) -> str:
        """A text without what is known to be secret."""
        if self.known:
            text, count = self.known.subn(MARK, text)
            self.counts["known secret"] += count
        return text

    # -- by the name before it ---------------------------------------------------------------

    def named(self, line: str) -> str:
        """A line without the values that stand after names."""
        for places in PLACES:
            found, at = [], 0
            for start, end in places(line):
                if start < at or end <= start or NOTHING.match(line, start):
                    continue
                self.counts["secret by its name"] += 1
                found += [line[at:start], MARK]
                at = min(end, len(line))
            line = "".join(found) + line[at:]
        return line

    # -- data --------------------------------------------------------------------------------

    def walk(self, value: Any, *, log: bool = False) -> Any:
        """Plain data without secrets, in the same shape.

        Args:
            value: what JSON can hold.
            log: whether texts may be a log's, and prompts are taken out of them, too.
        """
        if isinstance(value, str):
            return self.log(value) if log else self.text(value)
        if isinstance(value, Mapping):
            name = value.get("name", value.get("key"))
            pair = isinstance(name, str) and kind(name) >= Kind.LIKELY
            return {
                self.line(self.literal(key)): self.hidden(item)
                if hides(key, item) or (pair and key == "value")
                else self.walk(item, log=log)
                for key, item in value.items()
            }
        if isinstance(value, Sequence):
            return [self.walk(item, log=log) for item in value]
        return value

    def hidden(self, value: Any) -> Any:
        """Data that is secret: its texts are taken out."""
        if isinstance(value, str):
            if not value or NOTHING.fullmatch(value):
                return value
            self.counts["secret by its name"] += 1
            return MARK
        if isinstance(value, Mapping):
            return {self.line(self.literal(key)): self.hidden(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.hidden(item) for item in value]
        return value

    def words(self, words: Sequence[str]) -> list[str]:
        """A command line without secrets."""
        found = []
        option, before = "", ""
        for word in words:
            if word.startswith("-") and len(word) > 1:
                option, sign, value = word.partition("=")
                if sign and hides(option, value):
                    self.counts["secret argument"] += 1
                    found.append(f"{option}={MARK}")
                else:
                    found.append(option + self.text(sign + value) if sign else self.text(option))
            elif hides(option, word) or (before in LOGIN_OPTIONS and ":" in word):
                self.counts["secret argument"] += 1
                found.append(MARK)
            else:
                found.append(self.text(word))
            before = word
        return found

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Every variable's name, and the values of those that are harmless."""
        return {name: self.variable(name, value) for name, value in sorted(variables.items())}

    def assigned(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Variables that somebody has set, without secrets; others than those keep their values."""
        return {
            name: MARK if value and hides(name, value) else self.text(value)
            for name, value in variables.items()
        }

    def variable(self, name: str, value: str) -> str:
        allowed = ALLOWED.fullmatch(name) and not hides(name, value)
        shown = self.text(value) if allowed else MARK
        if shown and shown != MARK and RANDOM.search(shown.replace(MARK, "")):
            shown = MARK
        if shown != value:
            self.counts["environment variable"] += 1
        return shown

    def assignments(self, text: str) -> str:
        """A text without secrets that has lines ``NAME=value``, as vLLM's collect_env prints."""
        # First what is known: with a sign of equality in it, it is taken for a variable itself.
        text = self.literal(text)
        text = ASSIGNMENT.sub(lambda match: f"{match[1]}={self.variable(match[1], match[2])}", text)
        return self.text(text)


# -- where the values of names stand in a line: from, and to -------------------------------------


def assigned(line: str) -> Iterator[tuple[int, int]]:
    """Values behind a name and a sign: ``name=value``, ``"name": "value"``."""
    for match in NAMED.finditer(line):
        start, name = match.end(), match["name"]
        if "," in match["sign"] and not pair_of(line, match.start(), start):
            continue
        before = BEFORE.search(line, max(match.start() - BEFORE_LENGTH, 0), match.start())
        what = kind(name, before[1] if before else "")
        if what is Kind.NONE:
            continue
        if HEADER.search(name):
            yield start, header_end(line, match.start(), start)
        elif what is not Kind.SECRET:
            if maybe(line, start, hashes=what is Kind.LIKELY):
                yield from several(line, start, value_end(line, start))
        elif not code(line, start) and not same(line, start, name):
            yield from several(line, start, secret_end(line, match), option=name.startswith("-"))


def several(
    line: str, start: int, end: int, sign: re.Pattern[str] = ANOTHER, *, option: bool = False
) -> Iterator[tuple[int, int]]:
    """A value, and those that follow it and look like secrets, too.

    Args:
        line: what it is in.
        start: where the value begins.
        end: where it ends.
        sign: what stands between two of them.
        option: whether they are an option's: all up to the next option are.
    """
    yield start, end
    quoted = bool(OPENING.match(line, start))
    while match := sign.match(line, end):
        start = match.end()
        if bool(OPENING.match(line, start)) is not quoted:
            return
        end = value_end(line, start, " \t,;)]}\"'`" if sign is ANOTHER else " \t\"'`")
        value = inside(line, start, min(end, len(line)))
        if option and quoted:
            if value.startswith("-"):
                return
        elif SIGN.search(value) or not mixed(value):
            return
        yield start, end


def mixed(value: str) -> bool:
    """Whether a word that stands where a secret may is none of a sentence, nor a model's name."""
    return (
        looks_secret(value, hashes=True)
        and bool(re.search(r"\d", value))
        and not re.fullmatch(r"[\w.-]+/[\w.-]+", value)
    )


def pair_of(line: str, name: int, value: int) -> bool:
    """Whether two texts with a comma between them are a name and its value.

    They are not where the first is the end of a path, or the second a name itself.
    """
    quoted = line[name - 1 : name] in {*QUOTES, "`"} if name else False
    return quoted and not re.match(r"\s?[:=]", line[value_end(line, value) :][:2])


def paired(line: str) -> Iterator[tuple[int, int]]:
    """Values in ``name: NAME, value: …``."""
    if "value" in line.lower():
        for match in PAIR.finditer(line):
            if match["below"] is None and kind(match["name"]) >= Kind.LIKELY:
                yield match.end(), value_end(line, match.end())


def tagged(line: str) -> Iterator[tuple[int, int]]:
    """Values in XML: ``<name>value</name>``."""
    if "</" in line:
        for match in TAG.finditer(line):
            if kind(match["name"]) >= Kind.LIKELY:
                yield match.end(), end_at(line, match.end(), "<")


def options(line: str) -> Iterator[tuple[int, int]]:
    """Values behind options: ``--name value``, ``ENV NAME value``."""
    for match in OPTION.finditer(line):
        what = kind(match["name"] or match["variable"])
        start = match.end()
        if what is Kind.SECRET or (what and maybe(line, start, hashes=True)):
            yield from several(line, start, value_end(line, start, " \t\"'`"), ANOTHER_WORD)


def sentences(line: str) -> Iterator[tuple[int, int]]:
    """Values in sentences: ``with password "…"``, ``API key … is not valid``."""
    for match in SENTENCE.finditer(line):
        *before, name = re.split(r"[ _/-]", match["name"])
        if not before:
            before = BEFORE.findall(line, max(match.start() - BEFORE_LENGTH, 0), match.start())
        what = kind(name, " ".join(before))
        start = match.end() - len(match["quote"] or "")
        end = min(value_end(line, start), len(line))
        value = inside(line, start, end)
        refused = REFUSED.match(line, end)
        if match["quote"]:
            goes = (
                bool(value)
                if what is Kind.SECRET
                else looks_secret(value, hashes=what is Kind.LIKELY)
            )
            goes &= not value.startswith("<")
        else:
            value = value.rstrip(".:!?")
            odd = re.search(r"\d", value) or (
                what is Kind.SECRET
                and re.search(r"[a-z].*[A-Z]|[A-Z]{2}.*[a-z]|[!@#$%^*+~]|\w-\w+-\w", value)
            )
            goes = looks_secret(value, hashes=what >= Kind.LIKELY) and not SIGN.search(value)
            goes = goes and bool(odd or refused) and not code(line, start)
            goes |= what is Kind.SECRET and bool(re.fullmatch(r"\d{4,}", value))
        if goes:
            yield from several(line, start, end)


PLACES = (paired, assigned, tagged, options, sentences)


def code(line: str, start: int) -> bool:
    return bool(CODE.match(line, start))


def same(line: str, start: int, name: str) -> bool:
    """Whether the value is a variable of the same name: ``password=password``."""
    word = re.match(r"\w+(?=[,)\s]|$)", line[start : start + len(name) + 2])
    return bool(word) and bool(re.search(rf"(?:^|[._-]){word[0]}$", name)) if word else False


def maybe(line: str, start: int, *, hashes: bool) -> bool:
    """Whether a value whose name says little may be a secret, or one of its parts in brackets."""
    part = line[start : start + SEEN]
    if code(line, start):
        return False
    if part[0] not in CLOSING:
        return looks_secret(inside(part, 0, min(value_end(part, 0), len(part))), hashes=hashes)
    part = part[: value_end(part, 0)]
    # Without quotes it may be the signature of a function.
    items = PART.findall(part if part[0] != "[" else re.sub(r"[\"'`\[\], ]+", '"', part))
    return any(looks_secret(item, hashes=hashes) for item in items)


def header_end(line: str, name: int, start: int) -> int:
    """The end of a header's value: of the quotes that it is in, or of the line."""
    if OPENING.match(line, start):
        return value_end(line, start)
    around = line[name - 1 : name] if name else ""
    end = line.find(around, start) if around in {"'", '"'} and around else -1
    return len(line) if end < 0 else end


def secret_end(line: str, match: re.Match[str]) -> int:
    """The end of a value that is secret for certain."""
    start = match.end()
    first = line[start]
    call = re.compile(r"[A-Za-z_]\w*\(").match(line, start)
    if OPENING.match(line, start) or first in CLOSING or call:
        return value_end(line, start)
    name, sign = match["name"], match["sign"].strip()
    if LINE_START.fullmatch(line, 0, match.start()) and (
        sign.endswith(":") or (sign == "=" and match["sign"] != "=")
    ):
        # YAML's, INI's: all of the line, a comment excepted.
        end = line.find(" #", start)
        end = len(line) if end < 0 else end
        return start + len(line[start:end].rstrip(" \t\r,"))
    if name.isupper() and sign == "=":
        around = line[match.start() - 1 : match.start()]
        stops = around if around in {'"', "'"} and around else " \t"
        return value_end(line, start, stops) if stops in " \t" else end_at(line, start, stops)
    bare = BARE.match(line, start)
    end = bare.end() if bare else start
    while end > start + 1 and line[end - 1] in ")]}":
        end -= 1
    return end


def end_at(line: str, start: int, mark: str) -> int:
    end = line.find(mark, start)
    return len(line) if end < 0 else end


def hides(name: str, value: Any) -> bool:
    """Whether the value of an option, a variable or a field is secret."""
    what = Kind.SECRET if PRIVATE_OPTION.fullmatch(name) else kind(name)
    if what is Kind.SECRET:
        return not (isinstance(value, str) and re.fullmatch(r"\d+(?:\.\w+){1,5}\S{0,20}", value))
    hashes = what is Kind.LIKELY
    return bool(what) and isinstance(value, str) and looks_secret(value, hashes=hashes)


# -- what is known ---------------------------------------------------------------------------


def secrets(environment: Mapping[str, str], words: Sequence[str]) -> Iterator[str]:
    """What is known to be secret of an environment and a command line."""
    for name, value in environment.items():
        if hides(name, value):
            yield value
        elif not ALLOWED.fullmatch(name):
            yield from RANDOM.findall(value)
        yield from values(value)
    option, before = "", ""
    for word in words:
        value = word
        if word.startswith("-"):
            option, _, value = word.partition("=")
        # A hook's command has words that stand everywhere.
        if value and hides(option, value) and not option.endswith("exec"):
            yield value
        if before in LOGIN_OPTIONS and ":" in word:
            yield from (word, word.partition(":")[2])
        yield from values(value or word)
        before = word


def values(text: str) -> Iterator[str]:
    """What is secret in a text by the name before it, and the passwords in its URLs."""
    for line in text[:TEXT].splitlines():
        if "://" in line:
            yield from passwords(line)
        for places in PLACES:
            for start, end in places(line):
                if not NOTHING.match(line, start):
                    yield inside(line, start, min(end, len(line)))


def passwords(text: str) -> Iterator[str]:
    """The passwords in a text's URLs."""
    for match in re.finditer(r"://[^\s/@:]*:(?!\d{1,5}(?:[/?#]|$))([^\s'\"<>]*)@", text):
        yield from {match[1], unquote(match[1])}


