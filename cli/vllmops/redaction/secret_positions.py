"""Where the values of names stand in a line: behind signs, in tags and options, in sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .secret_names import Secrecy, classify_name
from .secret_values import (
    CLOSING,
    CODE,
    NOTHING,
    OPENING,
    QUOTE,
    QUOTES,
    find_value_end,
    is_passphrase,
    looks_secret,
    mentions_cache,
    strip_quotes,
)
from .secret_words import BEFORE, BEFORE_LENGTH

__all__ = ["BELOW", "PLACES", "is_plausible_secret"]

SEEN = 300  # characters of a value whose name says little

# A name and what stands between it and its value, in code, JSON, headers, queries, tables.
NAMED = re.compile(
    r"(?<![\w.$-])(?P<name>[\w.$-]++)(?:\[[\w.-]{1,40}\](?=\s?[:=]))?"
    rf"(?P<sign>{QUOTE}?\]?[ \t]{{0,4}}(?::\s?&?[A-Za-z][\w.\[\]| ]{{0,30}}=\s(?=[bru]?{QUOTE})"
    rf"|=>|:=|<-|<<<|=(?!=)"
    rf"|(?<!\s)==(?![\s=]|\d+(?:\.\w+)+(?:[\s,;\"']|$))"
    rf"|\uff1a|::(?=\s)|:(?![:/]))\s{{0,4}}(?:(?:!!?|&)\w+\s+|0x[0-9a-f]+\s(?=\")"
    rf"|\(string\) (?:\(len=\d+\) )?|Str\()?"
    r"|(?<=-)>(?=\S*\d)"  # the name ends with the hyphen of an arrow
    rf"|{QUOTE}\]?\)\s+or\s+(?=[bru]?{QUOTE})"
    rf"|{QUOTE}?[\])]?\)?\s[!=]==?\s(?=[bru]?{QUOTE})"  # a comparison
    rf"|{QUOTE};s:\d+:(?=\")|[ \t]+\.{{3,}}[ \t]+"  # PHP's, a table with dots
    rf"|{QUOTE}(?P<pair>\s?,\s?|\s(?:a\d+=)?)(?=[bru]?{QUOTE})"
    r"|[ \t]{1,40}(?:[|\u2502\u2192]|->)[ \t]{1,4}|\t+)(?=\S)"
)
OPTION = re.compile(
    r"(?<![\w-])(?:--?(?P<name>[A-Za-z][\w.-]*+)"
    r"|(?:(?:ENV|ARG|setenv|set -\w{1,3}|con\w+ set) (?:[\w.@:/-]{0,100}[/:])?|&)"
    r"(?P<variable>[\w.-]++))"
    r"[ \t]+(?=[^\s|&;>\\-])"
)
HEADER = re.compile(r"(?i:(?:proxy-)?authorization|(?:set-)?cookie)$")
# In sentences: with password "…", API key … is not valid.
SENTENCE = re.compile(
    r"(?<![\w.-])(?P<name>(?i:(?:(?:secret|access|api|private|auth(?:entication|orization)?|bearer"
    r"|admin|session|refresh|signing|license|account|hub|security|master|service|client|encryption"
    r"|shared|user(?:name)?|db|database|root|aws)[ _/-]?|\w{1,30}[_-]){0,3}"
    r"(?:keys?|token|tokens(?= (?:are|were) )|secrets?|passwords?|passwd|pass[ -]?phrase|passcode"
    r"|pwd|pw|pass(?=\s[\"'`])|cred(?:ential)?s?|pin|otp|access key id"
    r"|community(?: string)?|(?:recovery|backup) code"
    r"|basic auth|pat)|passwort|kennwort|mot de passe|contrase[ñn]a|senha|wachtwoord|has[łl]o"
    r"|пароль|токен|lösenord|salasana|parola))"
    # for project alpha = …; of the cluster is …
    r"(?:\s+(?:for\s(?:'[^']{1,100}'|\"[^\"]{1,100}\")"
    r"|(?:for|of|in|on|from|at|by|to|you|I|we|für|von|de|del|du|pour|para|per|voor|для|dla)"
    r"\s[^\s:=\"'`][^\s:=]{0,59})(?:\s[^\s:=]{1,40}){0,6}?"
    r"(?=\s?[:=]\s|\s(?:is|was)\s)"
    r"|\s+(?i:(?:must|to|should) be [\w -]{1,30}, (?:but )?(?:got|not)|has the value"
    r"|from (?:the )?\w{1,20} to|changed|do(?:es)? not match(?=:)"
    r"|is|are|was|set|to|of|provided|given|supplied|received|used|value|with|named|from"
    r"|header|pair|now|(?:mismatch|accepted|rejected|refused|invalid|expired|wrong|incorrect|denied"
    r"|revoked|unknown|created|generated|issued|too \w+|not \w+)(?=[: (])"
    r")|\s?\[[\w*. -]{1,20}\](?=\s?[:=]|\s*$)|\s\([a-z ]{2,30}\)(?=\s?[:=-])"
    r"|\s+for\s+(?:user\s+)?[^\s:]{1,60}(?=[\s:])){0,3}"
    r"(?:(?:\s*+[:=])?\s++(?:(?:expected|wanted|got) )?|\s*+[(\[])(?:<\w{1,10}>)?"
    rf"(?P<quote>[bru]?{QUOTE})?(?=[^\s])"
)
LAST = re.compile(
    r"(?<![\w.-])(?P<name>(?i:pass(?:word|wd|phrase|code)?|passwort|kennwort|pwd|pw|secret|token|key))\b"
    r"[,;]?(?:\s(?:'[^']{1,100}'|\"[^\"]{1,100}\"|[^\s:=]{1,60})){0,8}\s?[:=]\s{1,4}(?P<value>\S.{3,100}?)\s*$"
)
LETTER_AND_OTHER = re.compile(r"(?=\S*[^\W\d_])(?=\S*[\d!@#$%^&*~+.-])(?!\S*://)")
RIGHTS = re.compile(
    r"(?i)(?<![a-z])(?:api|secret|password|credential|(?:en|de)crypt|(?:un)?auth(?!or)|log ?in"
    r"|s3|sign)(?:s|ed|ing|ion|enticat\w+)?(?![a-z])"
)
AROUND = 100  # characters
# What follows a secret, and may be one more: a key in a list, a word behind an option.
ANOTHER = re.compile(r"(?:,? (?:and|or|to|but got|got|instead of|!=|->|/|vs\.?) |\s?,\s?)(?=\S)")
ANOTHER_WORD = re.compile(r"[ \t]+(?=[^\s|&;>\\-])")
PART = re.compile(r"(?<=[\"'])[^\"'\s]++(?=[\"'])")
TOLD = re.compile(r"(?:[^\s<>\"`.,;:!?)\]}']|[.,;:!?)\]}'](?=[^\s<>\"`.,;:!?)\]}'])|<(?=[\d!?.]))*")
SIGN = re.compile(r"^[\w-]+[=:]")
SYMBOLS = re.compile(r"[=:].*[!#$%^&*~].*[=:]|[!#$%^*~][^=:]*[!#$%^&*~]")
REFUSED = re.compile(
    r"[\"'`)]?,? (?:which |that |it )?(?:is|was|has|isn't|wasn't|does|did)? ?"
    r"(?:not (?:a )?(?:valid|correct|accepted|known|found"
    r"|allowed|authorized|match)|invalid|wrong|incorrect|expired|rejected|denied|revoked|unknown)"
)
# name: NAME, value: …, and the other way round; in XML as elements and as attributes.
IS = rf"{QUOTE}?\s{{0,4}}[:=>]\s{{0,4}}"
NEXT = r"(?:</[\w:.-]{1,40}>)?\s{0,4},?\s{0,4}<?"
VALUE = rf"{QUOTE}?(?:(?:parameter)?val(?:ue)?|string|content|v){IS}(?=\S)"
PAIR = re.compile(
    rf"(?i)(?:\b|parameter)(?:name|key|type|k){IS}{QUOTE}?(?P<name>[\w.-]++){QUOTE}?{NEXT}"
    rf"{VALUE}"
)
HAS_PAIR = re.compile(r"(?i)val|string|content|\bv\b")
PAIR_BACK = re.compile(rf"(?i)\b{VALUE}")
NAME_BEHIND = re.compile(
    rf"(?i){NEXT}{QUOTE}?(?:parameter)?(?:name|key|type|k){IS}{QUOTE}?(?P<name>[\w.-]+)"
)
TAG = re.compile(
    r"<(?P<tag>[\w:.-]++)(?:\s[^<>]{0,100}?\b(?:name|key|id)=[\"'](?P<name>[\w.-]+)[\"'])?"
    r"(?:\s[^<>]{0,200})?>(?:(?=[^<\s])|<!\[CDATA\[)"
)
BELOW = re.compile(
    rf"^\s*(?:- )?<?{QUOTE}?(?:\w*value|val|v|string|content|data|text|plain(?:text)?){QUOTE}?"
    r"\s*(?:[:=>]|\(\d+\))\s*(?=[^\s{\[])",
    re.IGNORECASE,
)
# A word as people write it unquoted; what may end it is part of it, where nothing follows.
BARE = re.compile(
    r"(?:[^\s\"'<>`&,;\\]|,(?!\s|$)|&(?![\w.-]+=|$)|;(?!\s|$|[\w ]{1,40}=)|\\(?![\"'nrt\\]))+"
)
# What a validator was given, of FastAPI's and pydantic's errors, behind the place of the field.
GIVEN = re.compile(
    rf"{QUOTE}loc{QUOTE}:\s?[\[(](?P<place>[^\])]{{0,300}})[\])][^{{}}]{{0,600}}?{QUOTE}input{QUOTE}:\s?"
)
# argparse's error: argument -k/--api-key: invalid choice: 'X'
ARGUMENT = re.compile(
    r"\bargument (?:-\w/)?--(?P<name>[\w-]+)(?:/-{1,2}[\w-]+)*: "
    rf"(?P<why>[a-z][\w ]*: (?={QUOTE}))?"
)
# The name of a secret in Kubernetes, and not what it holds.
OBJECT = re.compile(
    r"(?:[a-z]+[/-])*(?:(?:secret|token|credential|key|cert)s?|creds|regcred|tls|auth)(?:[\"'`]|$)"
)
SNAKE = re.compile(r"(?<=[!=]= )[\"'][a-z]+(?:_[a-z]+)+[\"']")  # compared with a name in code
LEVEL = re.compile(r"(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL)[: ]+$")
CLASS = re.compile(r"[\"'](?:[A-Z]+[a-z]+){3,}[\"']")
TABLE = {"|", "\u2502"}
CELL = re.compile(r"[A-Z][a-z]*(?: [\w'-]+){2,}[^|\u2502]*[|\u2502]")  # a sentence in a table
TURN = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
ANGLE = re.compile(r"<\S{4,200}?>(?=[\s,;)\]]|$)")
VARIABLE = re.compile(r"[\"'`]?(?P<name>[A-Z]+(?:_[A-Z]+)+)(?:[\"'`,)\]}\s]|$)")
LINE_START = re.compile(r"[\s-]*(?:export )?[\"']?$")


def find_assigned_values(line: str) -> Iterator[tuple[int, int]]:
    """Values behind a name and a sign: ``name=value``, ``"name": "value"``."""
    at = past = 0  # what is in another value is not looked at again, and again
    while match := NAMED.search(line, at):
        start, name = match.end(), match["name"]
        at = match.end("name")
        if start < past:
            continue
        if match["pair"] and not is_name_value_pair(line, match.start(), start):
            continue
        before = BEFORE.search(line, max(match.start() - BEFORE_LENGTH, 0), match.start())
        what = classify_name(name, before[1] if before else "")
        if what is Secrecy.NONE or (name.startswith("-") and is_argparse_error(line, match)):
            continue
        if nothing := NOTHING.match(line, start):
            past = nothing.end()
            continue
        if is_kubernetes_object(line, start, name) or is_logger_name(line, match):
            continue
        if what is Secrecy.MAYBE and mentions_cache(line, match.start()):
            continue
        at = start
        if HEADER.search(name):
            yield start, find_header_end(line, match.start(), start)
        elif what is not Secrecy.SECRET or SNAKE.match(line, start):
            if may_be_secret(
                line,
                start,
                hashes=what >= Secrecy.LIKELY or mentions_access(line, match.start(), start),
            ):
                past = find_value_end(line, start)
                yield from extend_to_adjacent_values(line, start, past)
        elif match["sign"].strip() in TABLE and CELL.match(line, start):
            continue
        elif not is_code(line, start) and not is_variable_name(line, start, name):
            past = find_secret_end(line, match)
            yield from extend_to_adjacent_values(line, start, past, option=name.startswith("-"))


def is_kubernetes_object(line: str, start: int, name: str) -> bool:
    """Whether the name of a secret object stands there, and not what it holds."""
    start += bool(OPENING.match(line, start))
    return name.lower() in {"secret", "secrets"} and bool(OBJECT.match(line, start))


def is_logger_name(line: str, match: re.Match[str]) -> bool:
    """Whether the name is a logger's, behind a level: INFO app.credentials: Found them."""
    if "." not in match["name"] or not match["sign"].startswith(":"):
        return False
    return bool(LEVEL.search(line, max(match.start() - len("CRITICAL  "), 0), match.start()))


def is_argparse_error(line: str, match: re.Match[str]) -> bool:
    """Whether behind an option and a colon stands what is wrong with it, and no value."""
    return bool(ARGUMENT.search(line, max(match.start() - len("argument -x/"), 0), match.end()))


def extend_to_adjacent_values(
    line: str, start: int, end: int, separator: re.Pattern[str] = ANOTHER, *, option: bool = False
) -> Iterator[tuple[int, int]]:
    """A value, and those that follow it and look like secrets, too.

    Args:
        line: what it is in.
        start: where the value begins.
        end: where it ends.
        separator: what stands between two of them.
        option: whether they are an option's: all up to the next option are.
    """
    yield start, end
    quoted = bool(OPENING.match(line, start))
    while match := separator.match(line, end):
        start = match.end()
        if bool(OPENING.match(line, start)) is not quoted:
            return
        end = find_value_end(line, start, " \t,;)]}\"'`" if separator is ANOTHER else " \t\"'`")
        value = strip_quotes(line, start, min(end, len(line)))
        if option and quoted:
            if value.startswith("-"):
                return
        elif SIGN.search(value) or not is_plausible_secret(value):
            return
        yield start, end


def is_plausible_secret(value: str) -> bool:
    """Whether a word that stands where a secret may is none of a sentence, nor a model's name."""
    return (
        looks_secret(value, hashes=True)
        and bool(re.search(r"[\d!@#$%^&*~]", value))
        and not re.fullmatch(r"[\w.-]+/[\w.-]+", value)
    )


def is_name_value_pair(line: str, name: int, value: int) -> bool:
    """Whether two texts with a comma between them are a name and its value.

    They are not where the first is the end of a path, or the second a name itself, or a class's.
    """
    if CLASS.match(line, value):
        return False
    quoted = line[name - 1 : name] in {*QUOTES, "`"} if name else False
    return quoted and not re.match(r"\s?[:=]", line[find_value_end(line, value) :][:2])


def find_paired_values(line: str) -> Iterator[tuple[int, int]]:
    """Values in ``name: NAME, value: …``."""
    if HAS_PAIR.search(line):
        for match in PAIR.finditer(line):
            if classify_name(match["name"]) >= Secrecy.LIKELY:
                yield match.end(), find_value_end(line, match.end())


def find_rejected_values(line: str) -> Iterator[tuple[int, int]]:
    """Values that a validator or argparse refused."""
    for match in GIVEN.finditer(line):
        if any(
            classify_name(name) >= Secrecy.LIKELY for name in re.findall(r"[\w.-]+", match["place"])
        ):
            yield match.end(), find_value_end(line, match.end())
    for match in ARGUMENT.finditer(line):
        if match["why"] and classify_name(match["name"]) >= Secrecy.LIKELY:
            yield match.end(), find_value_end(line, match.end())


def find_reversed_pairs(line: str) -> Iterator[tuple[int, int]]:
    """Values in ``value: …, name: NAME``."""
    if HAS_PAIR.search(line):
        for match in PAIR_BACK.finditer(line):
            end = find_value_end(line, match.end())
            name = NAME_BEHIND.match(line, end)
            if name and classify_name(name["name"]) >= Secrecy.LIKELY:
                yield match.end(), end


def find_xml_values(line: str) -> Iterator[tuple[int, int]]:
    """Values in XML: ``<name>value</name>``."""
    if "</" in line:
        for match in TAG.finditer(line):
            if (
                max(classify_name(match["tag"]), classify_name(match["name"] or ""))
                >= Secrecy.LIKELY
            ):
                yield match.end(), find_mark_or_end(line, match.end(), "<")


def find_option_values(line: str) -> Iterator[tuple[int, int]]:
    """Values behind options: ``--name value``, ``ENV NAME value``."""
    for match in OPTION.finditer(line):
        what = classify_name(match["name"] or match["variable"])
        start = match.end()
        if is_variable_name(line, start, match["name"] or match["variable"]):
            continue
        if what is Secrecy.SECRET or (what and may_be_secret(line, start, hashes=True)):
            yield from extend_to_adjacent_values(
                line, start, find_value_end(line, start, " \t\"'`"), ANOTHER_WORD
            )


def find_sentence_values(line: str) -> Iterator[tuple[int, int]]:
    """Values in sentences: ``with password "…"``, ``API key … is not valid``."""
    for match in SENTENCE.finditer(line):
        *before, name = re.split(r"[ _/-]+", match["name"])
        if not before:
            before = BEFORE.findall(line, max(match.start() - BEFORE_LENGTH, 0), match.start())
        what = classify_name(name, " ".join(before))
        if what is Secrecy.NONE:
            continue
        start = match.end() - len(match["quote"] or "")
        if is_kubernetes_object(line, start, name) or is_variable_name(line, start, name):
            continue
        if what is Secrecy.MAYBE and mentions_cache(line, match.start()):
            continue
        end = min(find_value_end(line, start), len(line))
        told = TOLD.match(line, start)
        if what is Secrecy.SECRET and told and not match["quote"]:  # people don't quote it
            end = told.end()
        value = strip_quotes(line, start, end)
        refused = REFUSED.match(line, end)
        if match["quote"]:
            goes = (
                bool(value)
                if what is Secrecy.SECRET
                else looks_secret(
                    value, hashes=what is Secrecy.LIKELY or mentions_access(line, *match.span())
                )
            )
            goes &= not value.startswith("<") and (what is Secrecy.SECRET or not SIGN.search(value))
        else:
            value = value.rstrip(".:!?")
            odd = re.search(r"\d", value) or (
                what is Secrecy.SECRET
                and re.search(r"[a-z].*[A-Z]|[A-Z]{2}.*[a-z]|[!@#$%^*+~]|\w-\w+-\w", value)
            )
            hashes = what >= Secrecy.LIKELY or mentions_access(line, *match.span())
            goes = (
                looks_secret(value, hashes=hashes)
                and " " not in value
                and (
                    not SIGN.search(value)
                    or bool(SYMBOLS.search(value))
                    or (name.startswith(("cred", "auth")) and ":" in value)
                )
            )
            goes = goes and bool(odd or refused) and not is_code(line, start) and value[:2] != "--"
            goes |= what is Secrecy.SECRET and bool(re.fullmatch(r"\d{4,}", value))
        if goes:
            yield from extend_to_adjacent_values(line, start, end)


def find_trailing_value(line: str) -> Iterator[tuple[int, int]]:
    """A value at the end of a line that began with the name of a secret, behind a colon."""
    match = LAST.search(line)
    if (
        not match
        or NOTHING.match(line, match.start("value"))
        or is_code(line, match.start("value"))
    ):
        return
    before = line[max(match.start("name") - BEFORE_LENGTH, 0) : match.start("name")]
    words = BEFORE.findall(before)
    if classify_name(match["name"], words[0] if words else "") is not Secrecy.SECRET:
        return
    value = match["value"]
    told = " for " in line[match.start() : match.start("value")] and "/" not in value
    made_up = is_plausible_secret(value) or (told and re.fullmatch(r"\w+(?:[.-]\w+){2,}", value))
    if is_passphrase(value) or (" " not in value and LETTER_AND_OTHER.match(value) and made_up):
        yield match.start("value"), match.end("value")


PLACES = (
    find_paired_values,
    find_reversed_pairs,
    find_rejected_values,
    find_assigned_values,
    find_xml_values,
    find_option_values,
    find_sentence_values,
    find_trailing_value,
)


def mentions_access(line: str, name: int, value: int) -> bool:
    """Whether a line speaks of rights around a name: a key there is none of a cache."""
    return bool(
        RIGHTS.search(line, max(name - AROUND, 0), name)
        or RIGHTS.search(line, value, value + AROUND)
    )


def is_code(line: str, start: int) -> bool:
    return bool(CODE.match(line, start))


def is_variable_name(line: str, start: int, name: str) -> bool:
    """Whether the value is the name of a variable: ``password=password``, ``key='API_KEY'``."""
    if (variable := VARIABLE.match(line, start)) and classify_name(
        variable["name"]
    ) >= Secrecy.LIKELY:
        return True
    word = re.match(r"\w+(?=[,)\s]|$)", line[start : start + len(name) + 2])
    if not word:
        return False
    snake = TURN.sub("_", word[0]).lower()  # of a class: offload_key: OffloadKey
    return bool(re.search(rf"(?:^|[._-])(?:{word[0]}|{snake})$", name))


def may_be_secret(line: str, start: int, *, hashes: bool) -> bool:
    """Whether a value whose name says little may be a secret, or one of its parts in brackets."""
    part = line[start : start + SEEN]
    if is_code(line, start):
        return False
    if part[0] not in CLOSING:
        return looks_secret(
            strip_quotes(part, 0, min(find_value_end(part, 0), len(part))), hashes=hashes
        )
    part = part[: find_value_end(part, 0)]
    # Without quotes it may be the signature of a function.
    items = PART.findall(part if part[0] != "[" else re.sub(r"[\"'`\[\], ]+", '"', part))
    return any(looks_secret(item, hashes=hashes) for item in items)


def find_header_end(line: str, name: int, start: int) -> int:
    """The end of a header's value: of the quotes that it is in, or of the line."""
    if OPENING.match(line, start):
        return find_value_end(line, start)
    around = line[name - 1 : name] if name else ""
    end = line.find(around, start) if around in {"'", '"'} and around else -1
    return len(line) if end < 0 else end


def find_secret_end(line: str, match: re.Match[str]) -> int:
    """The end of a value that is secret for certain."""
    start = match.end()
    first = line[start]
    call = re.compile(r"[A-Za-z_]\w*\(").match(line, start)
    if OPENING.match(line, start) or first in CLOSING or call:
        return find_value_end(line, start)
    name, sign = match["name"], match["sign"].strip()
    if first == "<" and (angle := ANGLE.match(line, start)):
        return angle.end()
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
        return (
            find_value_end(line, start, stops)
            if stops in " \t"
            else find_mark_or_end(line, start, stops)
        )
    bare = BARE.match(line, start)
    end = bare.end() if bare else start
    while end > start + 1 and line[end - 1] in ")]}":
        end -= 1
    return end


def find_mark_or_end(line: str, start: int, mark: str) -> int:
    end = line.find(mark, start)
    return len(line) if end < 0 else end
