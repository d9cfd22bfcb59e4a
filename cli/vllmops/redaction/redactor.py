"""Takes secrets and prompts out of what leaves the machine.

Two nets: what is known to be secret, from the server's environment and arguments, is taken out
wherever it stands; what looks like a secret, by the name before it (`secret_names`) or by its form
(`secret_forms`), is taken out, too. Hashes stay: the keys of caches are some. Pure: text in, text
out; line by line, so that a long log costs no more memory than a short one.
"""

from __future__ import annotations

import base64
import binascii
import html
import math
import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from . import prompts
from .log_lines import LogLineClassifier
from .secret_blocks import PAIR_LINES, SecretBlockTracker, find_value_above_name
from .secret_columns import SecretColumnTracker, find_sql_values
from .secret_forms import FORMS, MARK, SecretForm
from .secret_names import STEMS, Secrecy, classify_name
from .secret_positions import PLACES
from .secret_values import (
    CLOSING,
    LEAST,
    NOTHING,
    RUN,
    build_alternation,
    is_random,
    list_written_forms,
    looks_secret,
    strip_quotes,
)
from .secret_words import WORD, find_nearby_secrets, is_unusual_word

__all__ = ["MARK", "Redactor", "find_launch_secrets"]

LINE = 32 << 10  # characters of a line; what is behind them is left out
CUT = "[the rest of the line is left out]"
CODED = 2  # how often what is coded in URLs or in base64 is decoded again
TOLD = 32  # secrets found in a text that are looked for in the lines around; each costs time
TEXT = 1 << 20  # characters of a text that is looked through for values

# Where in the table a form stands, by what a line with it has, by the rarest letter of that.
RARE = "`~^{}<>#?&;$@*%!+=|zjqx893764521_0/-:'\". kvw(,bygphfumclsdoainrte"
HINTS: dict[str, list[tuple[str, int]]] = {}
for number, form in enumerate(FORMS):
    for has in form.has:
        HINTS.setdefault(min(has, key=RARE.index), []).append((has, number))
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
ASSIGNED_WORD = re.compile(r"(?<!\S)\$(?:env:)?(?P<name>\w+) \+?= (?P<value>\S+)")  # PowerShell's
OPTION = re.compile(r"--?\w[\w.:-]*(?:=|$)")
LOGIN_OPTIONS = {"-u", "--user", "-U", "--proxy-user", "--auth", "--basic-auth"}

# Where ssh goes, behind the file of a key: no value of that name.
SSH = re.compile(
    r"\b(?:ssh|scp|sftp)\s[^;|&]{0,100}?(?<=\s)-i\s?(?:\"[^\"]*\"|[^\s\"]+)(?:\s+-[A-Za-z]\s?[^\s-]\S*)*\s+$"
)
DESTINATION = re.compile(r"[a-z_][a-z\d_-]{0,31}@[A-Za-z\d][A-Za-z\d.-]*(?=[\s:\"']|$)")
SSH_LENGTH = 200  # characters

# Of a public key, a checksum: what follows is no secret, up to the end of base64.
PUBLIC = re.compile(
    r"(?:(?i:sha(?:1|256|384|512)[:-])|\b(?:ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-\S+|sk-ssh-\S+) )"
    r"[A-Za-z0-9+/=_-]*$"
)
CODED_RUN = re.compile(r"[A-Za-z0-9+/_-]{16,}+={0,2}")
# What colours a terminal's text, also as JSON and others write it: it stands before every value.
COLOUR = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))"
    r"|(?:\^\[|\\{1,3}(?:x1[bB]|u001[bB]|033|e))\[[\d;:]*m"
)
# A printable character as URLs, HTML and JSON or source code write it, and a space in a query.
ESCAPE = re.compile(
    r"%(?:25)*(?P<url>[2-7][0-9A-Fa-f])|\\{1,3}(?:u(?!00[0189]|[dD][89a-fA-F])(?P<wide>[0-9a-fA-F]{4})|x(?P<source>[2-7][0-9A-Fa-f]))"
    r"|&(?:#0*(?P<decimal>3[2-9]|[4-9]\d|1[01]\d|12[0-6])|#[xX]0*(?P<hex>[2-7][0-9A-Fa-f])"
    r"|(?P<name>amp|lt|gt|quot|apos|equals|colon|nbsp|lbrace|rbrace|lpar|rpar|comma|semi));"
    r"|(?P<nothing>\\0|\\x00|\\u0000)(?![0-7]{2})"  # between the words of a command line
    r"|(?<![A-Za-z0-9/]{12})(?P<plus>\+)(?=[\w\"'%&:=])"
    r"|\\(?P<itself>[/:=#!@])"  # JSON's and those of properties
)
ESCAPES = ("%", "&", "\\", "+")  # a line with an escape has one of these


class Redactor:
    """Redacts, and counts what it has taken out, by kind.

    Args:
        secrets: known ones, taken out wherever they stand.
        deadline: by the monotonic clock, when to give up; texts that take minutes can be made.

    Raises:
        TimeoutError: from any method, at a line that comes later.
    """

    def __init__(self, secrets: Iterable[str] = (), deadline: float = math.inf) -> None:
        self.deadline = deadline
        self.counts: Counter[str] = Counter()
        forms = {form for secret in secrets for form in list_written_forms(secret)}
        self.known_secrets_pattern = re.compile(build_alternation(forms)) if forms else None
        self.max_secret_length = max(map(len, forms), default=0)
        self.remembered_secrets: deque[str] = deque(
            maxlen=TOLD
        )  # secrets that the text itself has named

    def redact_text(self, text: str) -> str:
        """A text without secrets; prompts stay, see `redact_log`."""
        return "\n".join(self.redact_lines(text.split("\n")))

    def redact_log(self, text: str) -> str:
        """A log without secrets, prompts and answers."""
        return "\n".join(self.redact_log_lines(text.split("\n")))

    def redact_server_log(self, text: str) -> str:
        """A server's log as `redact_log`, and without what anybody may have written in it."""
        return "\n".join(self.redact_server_log_lines(text.split("\n")))

    def redact_lines(self, lines: Iterable[str]) -> Iterator[str]:
        """Lines as `redact_text`, one by one."""
        for line, _ in iterate_with_lookahead(
            self.redact_detected_secrets(lines), 1
        ):  # what the next one tells is known then
            for secret in [secret for secret in self.remembered_secrets if secret in line]:
                line = line.replace(secret, MARK)  # noqa: PLW2901
                self.counts["known secret"] += 1
            yield line

    def redact_detected_secrets(self, lines: Iterable[str]) -> Iterator[str]:
        """Lines without what is secret by where it stands, and by its form."""
        blocks, columns = SecretBlockTracker(), SecretColumnTracker()
        for line, after in iterate_with_lookahead(
            map(self.redact_known_secrets, self.normalize_lines(lines)), PAIR_LINES
        ):
            start = blocks.find_secret_start(line, after)
            if start is None:
                start = find_value_above_name(line, after)
            if start is None:
                blocks.note_block_start(line)
                yield self.redact_line(self.redact_spans(line, columns.find_secrets(line)))
            elif NOTHING.match(line, start) or not line[start:]:
                yield line
            else:
                self.counts["secret of several lines"] += 1
                self.remember_secret(line[start:].strip(" \t\"',"))
                yield line[:start] + MARK

    def redact_log_lines(self, lines: Iterable[str]) -> Iterator[str]:
        """Lines as `redact_log`, one by one."""
        return prompts.redact_prompts(self.redact_lines(lines), self.counts)

    def redact_server_log_lines(self, lines: Iterable[str]) -> Iterator[str]:
        """Lines as `redact_server_log`, one by one."""
        known = LogLineClassifier()
        for line in self.redact_log_lines(lines):
            kept = known.compute_known_length(line)
            if kept < len(line) and line[kept:] != MARK:
                self.counts["log line of no known form"] += 1
                yield line[:kept] + MARK
            else:
                yield line

    def normalize_lines(self, lines: Iterable[str]) -> Iterator[str]:
        """Lines without colours, of a bounded length: what is longer is cut off before a word."""
        for line in lines:
            if time.monotonic() > self.deadline:
                raise TimeoutError
            if "[" in line:
                line = COLOUR.sub("", line)  # noqa: PLW2901
            if len(line) <= LINE:
                yield line
            else:
                self.counts["long line"] += 1
                # What begins before the cut and ends behind it is no known secret any more.
                head = self.redact_known_secrets(line[: LINE + self.max_secret_length])
                head = head[: min(LINE, len(head) - self.max_secret_length)].rpartition(" ")[0]
                yield f"{head} {CUT}"

    def redact_line(self, line: str, decode_depth: int = CODED) -> str:
        """A line without secrets, what is known to be one excepted."""
        if len(line) < LEAST:
            return line
        if "\0" in line:  # a command line, or an environment
            return "\0".join(self.redact_command_line(line.split("\0")))
        low = line.lower()
        for form in select_likely_forms(low):
            line = self.replace_and_count(form.name, form.pattern, line)
        if any(stem in low for stem in STEMS):
            line = self.redact_named_values(line)
        if decode_depth:
            line = self.redact_escaped(line, decode_depth - 1)
        line = RUN.sub(self.redact_random_run, line)
        if decode_depth:
            line = CODED_RUN.sub(lambda match: self.redact_base64(match[0], decode_depth - 1), line)
        return line

    def redact_random_run(self, match: re.Match[str]) -> str:
        """A run of characters, unless nobody can have written it."""
        if not is_random(match[0]) or PUBLIC.search(
            match.string, 0, match.start() + len("sha512-")
        ):
            return match[0]
        self.counts["random text"] += 1
        return MARK

    def redact_escaped(self, line: str, decode_depth: int) -> str:
        """A line whose secrets are written with escapes: as it is, or readable and without them."""
        if not any(mark in line for mark in ESCAPES):
            return line
        plain = ESCAPE.sub(decode_escape, line)
        if plain == line:
            return line
        redacted = self.redact_line(plain, decode_depth)
        return line if redacted == plain else redacted

    def redact_base64(self, word: str, decode_depth: int) -> str:
        """A word of base64's letters: as it is, or nothing of it, if there are secrets in it."""
        try:
            content = base64.b64decode(word.rstrip("=").translate({45: "+", 95: "/"}) + "==")
            plain = content.decode("ascii")
        except (binascii.Error, ValueError):
            return word
        if not all(letter.isprintable() or letter.isspace() for letter in plain):
            return word
        redactor = Redactor()
        redactor.known_secrets_pattern = self.known_secrets_pattern
        if (
            "\n".join(
                redactor.redact_known_secrets(redactor.redact_line(x, decode_depth))
                for x in plain.split("\n")
            )
            == plain
        ):
            return word
        self.counts["secret in base64"] += 1
        return MARK

    def replace_and_count(self, kind: str, form: re.Pattern[str], text: str) -> str:
        def replace_match(match: re.Match[str]) -> str:
            keep = match["keep"] if with_kept else ""
            if keep and NOTHING.match(text, match.end("keep")):
                return match[0]
            self.counts[kind] += 1
            return keep + MARK

        with_kept = "keep" in form.groupindex
        return form.sub(replace_match, text)

    def remember_secret(self, value: str) -> None:
        """Remember a secret that was found by its place, unless it may be a common word."""
        if (
            WORD.fullmatch(value)
            and is_unusual_word(value)
            and value not in self.remembered_secrets
        ):
            self.remembered_secrets.append(value)

    def redact_known_secrets(self, text: str) -> str:
        """A text without what is known to be secret."""
        if self.known_secrets_pattern:
            text, count = self.known_secrets_pattern.subn(MARK, text)
            self.counts["known secret"] += count
        return text

    # -- by the name before it ---------------------------------------------------------------

    def redact_named_values(self, line: str) -> str:
        """A line without the values that stand after names."""
        for places in (find_sql_values, *PLACES, find_nearby_secrets):
            line = self.redact_spans(line, places(line))
        return line

    def redact_spans(self, line: str, spans: Iterable[tuple[int, int]]) -> str:
        """A line without what stands in some places, those of nothing excepted."""
        pieces, at, past = [], 0, 0
        for start, end in spans:
            if start < past or end <= start or is_ssh_destination(line, start):
                continue
            if nothing := NOTHING.match(line, start):
                past = max(past, nothing.end())
                continue
            self.counts["secret by its name"] += 1
            self.remember_secret(strip_quotes(line, start, min(end, len(line))))
            pieces += [line[at:start], MARK]
            past = at = min(end, len(line))
        return "".join(pieces) + line[at:] if pieces else line

    # -- data --------------------------------------------------------------------------------

    def redact_data(self, value: Any, *, log: bool = False) -> Any:
        """Plain data without secrets, in the same shape.

        Args:
            value: what JSON can hold.
            log: whether texts may be a log's, and prompts are taken out of them, too.
        """
        if isinstance(value, str):
            return self.redact_log(value) if log else self.redact_text(value)
        if isinstance(value, Mapping):
            name = value.get("name", value.get("key"))
            pair = isinstance(name, str) and classify_name(name) >= Secrecy.LIKELY
            return {
                self.redact_line(self.redact_known_secrets(key)): self.redact_all_text(item)
                if is_secret_value(key, item) or (pair and key == "value")
                else self.redact_data(item, log=log)
                for key, item in value.items()
            }
        if isinstance(value, Sequence):
            return [self.redact_data(item, log=log) for item in value]
        return value

    def redact_all_text(self, value: Any) -> Any:
        """Data that is secret: its texts are taken out."""
        if isinstance(value, str):
            if not value or NOTHING.fullmatch(value):
                return value
            self.counts["secret by its name"] += 1
            return MARK
        if isinstance(value, Mapping):
            return {
                self.redact_line(self.redact_known_secrets(key)): self.redact_all_text(item)
                for key, item in value.items()
            }
        if isinstance(value, Sequence):
            return [self.redact_all_text(item) for item in value]
        return value

    def redact_command_line(self, arguments: Sequence[str]) -> list[str]:
        """A command line without secrets."""
        redacted = []
        option, before = "", ""
        for word in self.redact_joined_words(arguments):
            if OPTION.match(word):
                option, sign, value = word.partition("=")
                if sign and is_secret_value(option, value):
                    self.counts["secret argument"] += 1
                    redacted.append(f"{option}={MARK}")
                else:
                    redacted.append(
                        option + self.redact_text(sign + value)
                        if sign
                        else self.redact_text(option)
                    )
            elif is_secret_value(option, word) or (before in LOGIN_OPTIONS and ":" in word):
                self.counts["secret argument"] += 1
                redacted.append(MARK)
            else:
                redacted.append(self.redact_text(word))
            before = word
        return redacted

    def redact_joined_words(self, arguments: Sequence[str]) -> Iterator[str]:
        """The words of a command line without what is secret by the words before it."""
        shown = [f'"{word}"' if " " in word and '"' not in word else word for word in arguments]
        line = " ".join(shown)
        if len(arguments) < 2 or len(line) > LINE:
            yield from arguments
            return
        hidden, at = sorted(self.find_secret_spans(line)), 0
        for word, written_ in zip(arguments, shown, strict=True):
            begin, end = at + (word != written_), at + len(written_)
            first = next((start for start, stop in hidden if at <= start < end), None)
            if first is not None:
                self.counts["secret argument"] += 1
                yield word[: max(first - begin, 0)] + MARK
            else:
                yield word
            at = end + 1

    def find_secret_spans(self, line: str) -> Iterator[tuple[int, int]]:
        """Where in a line something is secret by a form that has more than one word."""
        for form in select_likely_forms(line.lower()):
            for match in form.pattern.finditer(line):
                start = match.end("keep") if "keep" in form.pattern.groupindex else match.start()
                if " " in line[match.start() : start] and start < match.end():
                    yield start, match.end()
        for match in ASSIGNED_WORD.finditer(line):
            if classify_name(match["name"]) is Secrecy.SECRET:
                yield match.span("value")

    def redact_environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Every variable's name, and the values of those that are harmless."""
        return {
            name: self.redact_variable(name, value) for name, value in sorted(variables.items())
        }

    def redact_secret_variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Variables that somebody has set, without secrets; others than those keep their values."""
        return {
            name: MARK if value and is_secret_value(name, value) else self.redact_text(value)
            for name, value in variables.items()
        }

    def redact_variable(self, name: str, value: str) -> str:
        allowed = ALLOWED.fullmatch(name) and not is_secret_value(name, value)
        shown = self.redact_text(value) if allowed else MARK
        if shown and shown != MARK and RANDOM.search(shown.replace(MARK, "")):
            shown = MARK
        if shown != value:
            self.counts["environment variable"] += 1
        return shown

    def redact_assignments(self, text: str) -> str:
        """A text without secrets that has lines ``NAME=value``, as vLLM's collect_env prints."""
        # First what is known: with a sign of equality in it, it is taken for a variable itself.
        # What goes over several lines is seen before its first is hidden.
        text = self.redact_text(self.redact_known_secrets(text))
        return ASSIGNMENT.sub(
            lambda match: f"{match[1]}={self.redact_variable(match[1], match[2])}", text
        )


def is_ssh_destination(line: str, start: int) -> bool:
    """Whether a user and a host stand there to which ssh goes with a key."""
    if not DESTINATION.match(line, start):
        return False
    return bool(SSH.search(line[max(start - SSH_LENGTH, 0) : start]))


def select_likely_forms(low: str) -> list[SecretForm]:
    """The forms that may be in a line, by a quick look at it in small letters."""
    found = {
        number
        for letter, hints in HINTS.items()
        if letter in low
        for has, number in hints
        if has in low
    }
    return [FORMS[number] for number in sorted(found)]


def iterate_with_lookahead(lines: Iterable[str], count: int) -> Iterator[tuple[str, Sequence[str]]]:
    """Lines, one by one, and at most so many of those that follow."""
    ahead: deque[str] = deque()
    for line in lines:
        ahead.append(line)
        if len(ahead) > count:
            yield ahead.popleft(), ahead
    while ahead:
        yield ahead.popleft(), ahead


def decode_escape(match: re.Match[str]) -> str:
    """The character that an escape stands for."""
    if match["plus"] or match["nothing"]:
        return " "
    if match["itself"]:
        return match["itself"]
    if match["name"] or match["decimal"]:
        return html.unescape(match[0])
    return chr(int(match["url"] or match["wide"] or match["source"] or match["hex"], 16))


def is_secret_value(name: str, value: Any) -> bool:
    """Whether the value of an option, a variable or a field is secret."""
    what = Secrecy.SECRET if PRIVATE_OPTION.fullmatch(name) else classify_name(name)
    if what is Secrecy.SECRET:
        return not (isinstance(value, str) and re.fullmatch(r"\d+(?:\.\w+){1,5}\S{0,20}", value))
    hashes = what is Secrecy.LIKELY
    return bool(what) and isinstance(value, str) and looks_secret(value, hashes=hashes)


# -- what is known ---------------------------------------------------------------------------


def find_launch_secrets(environment: Mapping[str, str], arguments: Sequence[str]) -> Iterator[str]:
    """What is known to be secret of an environment and a command line."""
    for name, value in environment.items():
        if is_secret_value(name, value):
            yield value
        elif not ALLOWED.fullmatch(name):
            yield from RANDOM.findall(value)
        yield from find_secret_values(value)
    option, before = "", ""
    for word in arguments:
        value = word
        if OPTION.match(word):
            option, _, value = word.partition("=")
        # A hook's command has words that stand everywhere.
        if value and is_secret_value(option, value) and not option.endswith("exec"):
            yield value
        if before in LOGIN_OPTIONS and ":" in word:
            yield from (word, word.partition(":")[2])
        yield from find_secret_values(value or word)
        before = word


def find_secret_values(text: str, depth: int = 2) -> Iterator[str]:
    """What is secret in a text by the name before it, and the passwords in its URLs.

    Args:
        text: any.
        depth: how often what is in the brackets of a secret is looked through, too.
    """
    for line in text[:TEXT].splitlines():
        if "://" in line:
            yield from find_url_passwords(line)
        for places in PLACES:
            for start, end in places(line):
                if not NOTHING.match(line, start):
                    value = strip_quotes(line, start, min(end, len(line)))
                    yield value
                    if value[:1] in CLOSING and depth:
                        yield from find_secret_values(value, depth - 1)


def find_url_passwords(text: str) -> Iterator[str]:
    """The passwords in a text's URLs."""
    for match in re.finditer(r"://[^\s/@:]*:(?!\d{1,5}(?:[/?#]|$))([^\s'\"<>]*)@", text):
        yield from {match[1], unquote(match[1])}
