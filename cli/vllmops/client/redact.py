"""Takes secrets and prompts out of what leaves the machine.

Two nets: what is known to be secret, from the server's environment and arguments, is taken out
wherever it stands; what looks like a secret, by the name before it or by its form, is taken out,
too. Hashes stay: the keys of caches are some. Pure: text in, text out.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, quote_plus

from .loglines import Lines

MARK = "[redacted]"
# Shorter ones stand in too many words; where they are expected their place tells them.
LEAST = 6
LEAST_LINE = 12  # of a secret with several

# Environment variables whose values tell how a server runs, and not with what rights.
ALLOWED = re.compile(
    r"(?:VLLM|VLLMOPS|CUDA|NVIDIA|NCCL|TORCH\w*|PYTORCH|TRITON|OMP|MKL|KMP|GOMP|HIP|ROCR|ROCM|RCCL"
    r"|HSA|RAY|FLASHINFER|GLOO|UCX|TRANSFORMERS|TOKENIZERS|HF_HUB|PYTHON\w*|MALLOC|MIMALLOC)_\w+"
    r"|PYTHON[A-Z]+|PATH|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|CONDA_PREFIX|HF_HOME|LANG|LC_ALL|TZ"
)
SECRET_VARIABLE = re.compile(
    r"(?:KEYS?|TOKENS?|PASS|PWD|AUTH|DSN|SALT|SIGNATURE|BEARER)$"
    r"|API_?KEY|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|COOKIE|WEBHOOK|SIGNING",
    re.IGNORECASE,
)
NO_SECRET = re.compile(r"(?:PWD|OLDPWD|.*_(?:FILE|PATH|DIR))$", re.IGNORECASE)
# Letters and digits in one word as people don't write them.
RANDOM = re.compile(r"(?=[^\s/:,;@]*\d)(?=[^\s/:,;@]*[A-Za-z])[A-Za-z0-9+=_\-~%]{20,}")
ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.MULTILINE)

# What stands before a secret, in code, JSON, headers, queries and command lines.
NAME = (
    r"api[_-]?keys?|(?<![A-Za-z0-9_])token|(?:access|auth|refresh|bearer|hf|hub|id|session|security"
    r"|github|gitlab|csrf|secret|account|service|admin|bot|registry|wandb|oauth2?)[_-]?token"
    r"|secret[\w-]{0,40}|passw(?:or)?d|passphrase|(?<![a-z])pwd|credentials?"
    r"|(?:private|signing|encryption|master|access|secret|account|shared|storage|sas|license|client"
    r"|admin|service|auth|hmac|ssh|rsa)[_-]?keys?(?:[_-]?id)?|authorization|(?:set-)?cookie|bearer"
    r"|dsn|connection[_-]?string|(?<![a-z])sig|signature|x-amz-[a-z-]{1,40}"
)
# Each of them, and each variable's name, has one of these.
STEMS = (
    *("key", "token", "secret", "pass", "pwd", "cred", "auth", "cookie", "bearer", "dsn", "sig"),
    *("connection", "x-amz"),
)
FOLLOWS = 8  # characters of the next line, where a value may begin
# Longest first: the environment's names are in capitals, and have anything before the last word.
VARIABLE = (
    r"\b[A-Z][A-Z0-9_]{0,60}_"
    r"(?:KEYS?|TOKEN|SECRET|PASS|PASSWORD|PASSWD|AUTH|COOKIE|DSN|CREDENTIALS)"
)
SEPARATOR = (
    r"(?:[\"'`\]]{0,2}[ \t]{0,3}(?:=>|:=|=(?!=)|:(?![:/]))\s{0,3}|[\"']\s?,\s?(?=[bru]?[\"']))"
)
NAMED = re.compile(rf"(?:(?i:(?P<name>{NAME}))|{VARIABLE}){SEPARATOR}")
OPTION = re.compile(rf"(?P<option>--(?:[A-Za-z]+[-_.]){{0,6}}(?i:{NAME}))[ \t]+(?=[^\s-])")
HEADER = re.compile(r"authorization|(?:set-)?cookie|bearer", re.IGNORECASE)
NOTHING = re.compile(r"(?:None|null|[Tt]rue|[Ff]alse|\[\]|\{\}|''|\"\"|\[redacted\])(?![\w.])")

SIGNING = re.compile(
    r"(?P<before>(?<![A-Za-z])(?:signing|hmac|secret|private|encryption|master|state|carrier)(?![a-z])"
    r"[\w \-]{0,24}"
    r"[\"'`]?\s{0,2}(?:[:=]|\bis\b)?\s{0,2}[\"'`(]?)(?<![0-9a-fA-F])[0-9a-fA-F]{64,}",
    re.IGNORECASE,
)
FORMS = (
    (
        "private key",
        re.compile(
            r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}KEY-----|\Z)",
            re.DOTALL,
        ),
        MARK,
    ),
    # A conversation's state, as clients carry it.
    ("carrier", re.compile(r"\bvllm:\d+:[A-Za-z0-9+/=_\-]{16,}(?::[0-9a-fA-F]{32,})?"), MARK),
    (
        "media",
        re.compile(r"(data:[\w.+-]+/[\w.+-]+(?:;[\w=.-]+)*;base64,)[\w+/=%-]{8,}"),
        r"\1" + MARK,
    ),
    (
        "URL credentials",
        re.compile(
            r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]{1,30}://)"
            r"(?:[^\s/@:'\"<>]*:(?!\d{1,5}(?:[/?#]|$))[^\s'\"<>]*|[^\s/?#@'\"<>]+)@"
        ),
        rf"\g<scheme>{MARK}@",
    ),
    (
        "token",
        re.compile(r"(?P<how>\b(?:[Bb]earer|BEARER)\s{1,3}b?[\"']?)(?!\[redacted)[\w.~+/=-]{8,}"),
        rf"\g<how>{MARK}",
    ),
    ("token", re.compile(r"(?P<how>\bBasic )[A-Za-z0-9+/]{6,}={0,2}(?![\w ])"), rf"\g<how>{MARK}"),
    (
        "token",
        re.compile(
            r"(?<![A-Za-z0-9])(?:hf_(?=[a-z]{0,40}[A-Z0-9])[A-Za-z0-9]{8,}|hf_[a-z]{20,}|sk-[\w-]{6,}|sk_(?:live|test)_\w{6,}"
            r"|gh[pousr]_\w{10,}|github_pat_\w{10,}|glpat-[\w-]{10,}|xox[abeprs]-[\w-]{8,}"
            r"|nvapi-[\w-]{10,}|AIza[\w-]{20,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|ya29\.[\w-]{10,}"
            r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
        ),
        MARK,
    ),
)

# What stands before a prompt or an answer in vLLM's log lines, and in requests as they are quoted.
SAID = re.compile(
    r"(?<![\w-])(?:prompts?|outputs?|inputs?|content|messages|texts?|instructions|query|queries"
    r"|documents|(?:prompt_|output_|input_)?token_ids|input_ids|input_value|response_body|body"
    r"|reasoning(?:_content)?|arguments|delta|tool_calls|system|file_data|stop|bad_words"
    r"|structured_outputs)[\"']?\s{0,2}[:=]\s?(?=[bru]{0,2}[\"'\[{(]|[a-zA-Z]\w{0,60}\()"
    r"|(?:JSON body:|\b[Rr]equest|\b[Rr]esponse:) (?=\{)"
)
# The rest of the line, whatever it is, and those that go on with it.
WHOLE = re.compile(
    r"(?<![\w-])(?:input |final |text )?prompt(?: text)?: "
    r"(?!None|\[redacted|[\"'\[{(]|\d+(?:\D|$))",
    re.IGNORECASE,
)
ENTRY = re.compile(
    r"(?P<process>\([\w.-]+ pid=\d+\) ?)?"
    r"(?P<head>[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? \[[^\]]*\])?"
)
OTHER_ENTRY = re.compile(r"(?:INFO|WARNING|ERROR|DEBUG|CRITICAL|Traceback)\b[: (]")


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
        text = self.literal(text)
        for kind, form, mark in FORMS:
            text = self.counted(kind, form, mark, text)
        text = self.counted("signing key", SIGNING, rf"\g<before>{MARK}", text)
        text = self.after(NAMED, "secret by its name", text)
        return self.after(OPTION, "secret by its name", text)

    def log(self, text: str) -> str:
        """A log without secrets, prompts and answers."""
        lines = []
        hiding: dict[str, str] = {}  # by process: how the entry began that goes on
        for line in self.text(text).split("\n"):
            entry = ENTRY.match(line)
            assert entry is not None  # both parts are optional
            process, head = entry["process"] or "", entry["head"] or ""
            # vLLM begins each further line of an entry as it began the first.
            if hiding.get(process) == head and not OTHER_ENTRY.match(line, entry.end()):
                lines.append(f"{entry.group()} {MARK}".lstrip())
                continue
            said, whole = self.quoted(line)
            lines.append(said)
            hiding.pop(process, None)
            if not whole:
                hiding[process] = head
        return "\n".join(lines)

    def tail(self, text: str) -> str:
        """A server's log as `log`, and without what anybody may have written in it."""
        lines, known = [], Lines()
        for line in self.log(text).split("\n"):
            kept = known.kept(line)
            if kept < len(line) and line[kept:] != MARK:
                self.counts["log line of no known form"] += 1
                line = line[:kept] + MARK  # noqa: PLW2901
            lines.append(line)
        return "\n".join(lines)

    def quoted(self, line: str) -> tuple[str, bool]:
        """A line without what was said, and whether that ended with the line."""
        found, whole, at = [], True, 0
        while whole and (match := SAID.search(line, at)):
            if WHOLE.match(line, match.start()):
                break  # it looks like a call, and may be one in a prompt's first words
            end = value_end(line, match.end())
            if not NOTHING.fullmatch(line, match.end(), end):
                self.counts["prompt or answer"] += 1
                found += [line[at : match.end()], MARK]
                whole = end <= len(line)
            else:
                found.append(line[at:end])
            at = min(end, len(line))
        line = "".join(found) + line[at:]
        if match := WHOLE.search(line):
            self.counts["prompt or answer"] += 1
            return line[: match.end()] + MARK, False
        return line, whole

    def after(self, names: re.Pattern[str], kind: str, text: str) -> str:
        """A text without the values that stand after names."""
        found, at = [], 0
        for match in (each for place in places(text) for each in names.finditer(text, *place)):
            start = match.end()
            if start < at or NOTHING.match(text, start):
                continue
            end = value_end(text, start)
            if end > len(text) or (
                HEADER.match(match[0]) and text[start : start + 1] not in QUOTES
            ):
                end = line_end(text, start)
            if end <= start:
                continue
            self.counts[kind] += 1
            found += [text[at:start], MARK]
            at = end
        return "".join(found) + text[at:]

    def counted(self, kind: str, form: re.Pattern[str], mark: str, text: str) -> str:
        text, count = form.subn(mark, text)
        self.counts[kind] += count
        return text

    def literal(self, text: str) -> str:
        """A text without what is known to be secret."""
        if self.known:
            text = self.counted("known secret", self.known, MARK, text)
        return text

    def walk(self, value: Any) -> Any:
        """Plain data without secrets, in the same shape."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.literal(key): self.walk(each) for key, each in value.items()}
        if isinstance(value, Sequence):
            return [self.walk(each) for each in value]
        return value

    def words(self, words: Sequence[str]) -> list[str]:
        """A command line without secrets."""
        found = []
        secret = False
        for word in words:
            if word.startswith("-"):
                option, sign, value = word.partition("=")
                secret = secret_option(option)
                if secret and sign:
                    self.counts["secret argument"] += 1
                    found.append(f"{option}={MARK}")
                else:
                    found.append(option + self.text(sign + value))
            elif secret:
                self.counts["secret argument"] += 1
                found.append(MARK)
            else:
                found.append(self.text(word))
        return found

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Every variable's name, and the values of those that are harmless."""
        return {name: self.variable(name, value) for name, value in sorted(variables.items())}

    def variable(self, name: str, value: str) -> str:
        allowed = ALLOWED.fullmatch(name) and not secret_variable(name)
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


def places(text: str) -> Iterator[tuple[int, int]]:
    """Where in a text a name may stand: its lines with a stem of one, and what follows them."""
    at = 0
    for line in text.split("\n"):
        low = line.lower()
        if any(stem in low for stem in STEMS):
            yield at, at + len(line) + FOLLOWS
        at += len(line) + 1


def secrets(environment: Mapping[str, str], words: Sequence[str]) -> Iterator[str]:
    """What is known to be secret of an environment and a command line."""
    for name, value in environment.items():
        if secret_variable(name):
            yield value
        elif not ALLOWED.fullmatch(name):
            yield from RANDOM.findall(value)
        if "://" in value:
            yield from passwords(value)
    secret = False
    for word in words:
        if word.startswith("-"):
            option, _, value = word.partition("=")
            secret = secret_option(option)
            if secret and value:
                yield value
        elif secret:
            yield word
        if "://" in word:
            yield from passwords(word)


def passwords(text: str) -> Iterator[str]:
    """The passwords in a text's URLs."""
    for match in re.finditer(r"://[^\s/@:]*:(?!\d{1,5}(?:[/?#]|$))([^\s'\"<>]*)@", text):
        yield match[1]


def secret_variable(name: str) -> bool:
    """Whether an environment variable is a secret, by its name."""
    return bool(SECRET_VARIABLE.search(name)) and not NO_SECRET.match(name)


def secret_option(option: str) -> bool:
    """Whether an option's value is a secret, by its name."""
    name = option.lstrip("-").replace("-", "_").rpartition(".")[2]
    return bool(re.search(rf"(?i:(?:^|_)(?:{NAME})$)", name))


def written(secret: str) -> Iterator[str]:
    """The forms in which a secret may be written down, those that nothing else has."""
    secret = secret.strip()
    whole = [] if secret.isdigit() and len(secret) < 2 * LEAST else [secret]
    lines = secret.splitlines()
    for each in whole + [line for line in lines if len(line) >= LEAST_LINE and len(lines) > 1]:
        if len(each) >= LEAST and each != MARK:
            once = {each, *quoted(each)}
            # JSON in JSON is not rare.
            yield from {*once, *(form for one in once for form in quoted(one))}
            yield from {quote(each, safe=""), quote(each), quote_plus(each)}


def quoted(text: str) -> set[str]:
    """A text between quotes in JSON, with and without other alphabets, and in Python."""
    return {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]}


CLOSING = {"(": ")", "[": "]", "{": "}"}
QUOTES = {'"', "'"}


def value_end(text: str, start: int) -> int:
    """Where the value that begins there ends: a quoted one, one in brackets, or a word.

    Returns:
        ``len(text) + 1`` where it is broken off.
    """
    at = start
    while at < len(text) and text[at] in "bruBRU" and text[at + 1 : at + 2] in {*QUOTES, *"bruBRU"}:
        at += 1
    if at < len(text) and text[at] in QUOTES:
        return quote_end(text, at)
    if at < len(text) and text[at] in CLOSING:
        return bracket_end(text, at)
    at = start
    while at < len(text) and text[at] not in " \t\r\n,;&)]}\"'":
        if text[at] in CLOSING and at > start:
            return bracket_end(text, at)
        at += 1
    return at


def quote_end(text: str, start: int) -> int:
    """The end of a quoted string as Python and JSON write them."""
    mark, at = text[start], start + 1
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == mark:
            return at + 1
        elif text[at] == "\n":
            return at
        at += 1
    return len(text) + 1


def bracket_end(text: str, start: int) -> int:
    """The end of what stands in brackets, with brackets and strings in it."""
    open_, at = [CLOSING[text[start]]], start + 1
    while at < len(text):
        mark = text[at]
        if mark in QUOTES and text[at - 1] in "([{,:= bru":
            at = quote_end(text, at)
            continue
        if mark in CLOSING:
            open_.append(CLOSING[mark])
        elif mark == open_[-1]:
            open_.pop()
            if not open_:
                return at + 1
        at += 1
    return len(text) + 1


def line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end
