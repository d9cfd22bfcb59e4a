r"""Where a value ends, whether it may be a secret, and in which forms it may be written down."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from operator import itemgetter
from os.path import commonprefix
from urllib.parse import quote, quote_plus

from .secret_forms import MARK
from .secret_names import make_word_set

# Shorter ones stand in too many words; where they are expected their place tells them.
LEAST = 6
LEAST_LINE = 12  # of a secret with several
LEAST_CODED = 8  # characters of base64 or hex
# What a variable with a secret's name may hold, and half of all lines, too.
COMMON = frozenset(
    {
        *("default", "enabled", "disabled", "required", "optional", "production", "development"),
        *("staging", "localhost", "password", "postgres", "secret", "string", "server", "models"),
        *("number", "engine", "worker", "system"),
    }
)

# A quote, and what stands for one in JSON that is in JSON, in HTML and in URLs.
QUOTE = r"(?:\\{0,15}[\"'`]|\\{1,15}u002[27]|&quot;|&#3[49];)"
OPENING = re.compile(
    r"[bruBRUfF]{0,2}(?P<slashes>\\{0,15})(?P<mark>\"\"\"|'''|[\"'`]|u002[27])|&quot;|&#3[49];"
)
# Where a secret comes from, or what stands for one: a variable, a command, a template, <your key>.
REFERENCE = (
    r"(?:\$\{[\w.]+(?::?\?[^}]{0,200})?\}|\$[A-Z_][A-Z0-9_]{2,}"
    r"|\$\((?!\s*(?:echo|printf))[^()]{1,300}\)"
    r"|\{\{[^{}]{1,200}\}\}|\{[a-z_]{1,40}\}"
    r"|<(?:set to )?(?:[A-Za-z' _-]{0,40}[ _-]|)(?i:your|secret|token|key|password|passphrase"
    r"|credentials?|api|redacted|hidden|masked|sensitive|unset|none|empty|value)\b"
    r"[A-Za-z' _-]{0,60}>"
    r"|\((?:sensitive(?: value)?|known after apply|hidden|redacted|unset|none|empty)\)"
    r"|\[[A-Z_]{2,40}\]|EMPTY|TEXT|STRING|\d+ bytes)"
)
NOTHING = re.compile(
    rf"(?:f?(?P<r>[\"']?)(?:Bearer |Basic |Token )?{REFERENCE}(?P=r)(?=[\"'`,;)\]}}]|\s|$)"
    r"|None|none|null|nil|NULL|N/A|n/a|undefined"
    r"|(?:is )?not (?:set|configured|given|used|provided|required)"
    r"|(?:secrets?|tokens?|credentials|passwords?|keys?)(?= (?:is|are|[\"'][a-z-]+[\"']) )"
    r"|(?:ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-\S+|RSA|ED25519|ECDSA)(?= )|[\"']\)$"
    r"|[Tt]rue|[Ff]alse|TRUE|FALSE|yes|no|YES|NO|on|off|unset|missing|empty"
    r"|[\[{(]\s*$|\[\]|\{\}|\(\)|''(?!')|\"\"(?!\")|\\$|(?:Secret(?:Str|Bytes)\()?b?(?P<q>\\{0,15}[\"']?)\*{3,}(?P=q)\)?"
    r"|[\"']?<?\[?(?:redacted|hidden|masked|REDACTED)\]?>?[\"']?"
    r"|\\{1,15}[\"']\\{1,15}[\"'])(?![\w.@!#$%^&*+~=/-])"
)
# Code that gets a value, and not the value; a type; a variable.
CODE = re.compile(
    r"(?:self|cls|args|kwargs|os|config|settings|request|params|data|env)\.[A-Za-z_]"
    r"|(?:await )?[A-Za-z_][a-z_]\w*(?:\.[A-Za-z_]\w*){0,9}\((?!\s*[bru]?[\"']|[^()\s]{0,60}\)\w)"
    r"|[A-Za-z_]\w*\.[\w.]*[(\[]"
    r"|[A-Za-z_]\w*\[[\w:\-]+\](?!\w)"
    # Where it is in a file.
    r"|[\"']?(?:~|\.{1,2})?(?:/\.?[a-z_][a-z_-]{0,30}){2,}(?=[\"'\s,;)}\]]|$)"
    r"|[\"']?(?:~|\.{1,2})?/[\w./-]{1,300}\.(?:pem|key|crt|cert|json|ya?ml|txt|toml)(?=[\"'\s,;)}\]]|$)"
    r"|lambda\b|(?:str|bytes|int|bool|float|string|object|SecretStr|Any)(?:[,)=\s|]|$)"
    r"|(?:Optional|Union|Annotated|list|dict|Literal)\[|<(?:class|function|bound|object)\b|typing\."
    r"|\$\{[\w:.-]+\}|\$[A-Z_][A-Z0-9_]*(?![\w])|\{\{|%\(\w+\)s|%s|\{[A-Za-z_]{0,40}\}"
)
# Of a model's tokens, and of hashes.
ORDINARY = re.compile(
    r"<\|?[^<>]{0,60}\|?>|\[[A-Z_]{1,20}\]|[\d.,%+\-/ ]{1,40}|[A-Za-z]?[a-z]{0,20}|[A-Z_]{1,30}"
    r"|[A-Za-z_]{1,60}(?:\.[A-Za-z_]{1,60}){1,9}|[a-z]{1,20}[_-][a-z]{1,20}|[a-z]{1,20}(?:_[a-z]{1,20}){0,9}"
    r"|(?:/(?!(?=\D*\d)[A-Za-z0-9+]{16,}={0,2}$)|\./|~/)[^!#$^&*]*|[a-z]+://.*|0x[0-9a-f]+"
)
SEVERAL_WORDS = re.compile(
    r"[A-Za-z][\w.-]*/[\w.-]+|cuda:\d+|[a-z_]+(?:\.[a-z_]\w*)+"  # models, devices, dtypes
    r"|[a-z_]+(?:\.[A-Z]?[a-z_]+)+|(?:[A-Z][a-z]{2,}){2,}"  # types
    r"|[a-z]{1,20}(?:-[a-z]{1,20}){0,9}|[A-Za-z_]\w*(?:\.\w+){2,}|(?:\{[\w.\[\]!:]+\}\W*)+"
)
HASH = re.compile(
    r"(?:\w{1,12}[-_:])?(?:[0-9a-f]{12}|[0-9a-f]{32}|[0-9a-f]{40}|[0-9a-f]{64}"
    r"|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})"
)
UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
# Letters and digits in one word as people don't write them.
RUN = re.compile(r"[A-Za-z0-9_+=~-]{20,}+")
NKEY = re.compile(r"S[UAONCX][A-Z2-7]{56}")  # the seed of a key of NATS, all in capitals
HEXLIKE = re.compile(r"[0-9a-f-]+|[0-9A-F-]+")
HEX_PART = re.compile(r"(?<![A-Za-z0-9])(?:[0-9a-f]{4,}|[0-9A-F]{4,})(?![A-Za-z0-9])")
WORDS = re.compile(r"[^A-Za-z0-9]+")
LEAST_RANDOM, LEAST_PIECE = 16, 10
CAMEL = re.compile(r"[A-Z][a-z]{2,}")
CLASS_NAME = 0.6  # of the name of a class, what such parts are at least
CHANGES = 0.35  # of the places between two characters, those where their kind changes
# Names with numbers, dates, sizes, ids: node-12, fp8_e4m3, 2026-11-22T10, 4096MiB, chatcmpl-….
SEPARATOR = re.compile(r"[-_=+./]")
PIECE = re.compile(
    r"[A-Za-z]*\d{0,4}[A-Za-z]{0,3}|[a-z]{1,3}\d{1,2}[a-z]{1,3}\d{0,2}|\d+[A-Za-z]{0,6}"
)
USUAL = re.compile(
    r"0x[0-9a-f]+|\d[\d-]*T[\d-]+Z?"
    r"|(?:chatcmpl|cmpl|resp|req\w*|msg|item|rs|call|file|batch|pod|trace|span)[-_]\w+"
    r"|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
)
CACHE = re.compile(r"(?i)cache|graph|(?<![a-z])(?:kv|put|block|gpg)(?![a-z])")
NEAR = 100  # characters
CLOSING = {"(": ")", "[": "]", "{": "}"}
QUOTES = {'"', "'"}
BRACKET_OR_QUOTE = re.compile(r"[()\[\]{}\"']")
# Characters of a value in brackets: a line may name a secret thousands of times.
REACH = 2048
# Words that a person chose for a passphrase, and those of sentences about one.
PHRASE_WORD = re.compile(r"[a-z]{3,10}|\d{1,4}")
OF_SENTENCES = make_word_set(
    "and the are was were been has have had not for from into than then this that these those "
    "its your our their can could will would should must may might does did please use used "
    "using set unset see check try found find failed failure error invalid valid wrong "
    "missing required expired changed change reset rotated denied refused rejected accepted "
    "enabled disabled default loaded loading user users name server file path key keys token "
    "tokens password passphrase secret secrets credentials authentication login access "
    "permission value values new old current last first when where which while until before "
    "after again later only also never always already still now without within with more less "
    "all any each other one two too long short read written stored yet but what how why who"
)
MOST_WORDS = 8


def looks_secret(value: str, *, hashes: bool = False) -> bool:
    """Whether a value whose name says little may be a secret; ``hashes``: also if it is a hash."""
    if len(value) < LEAST or ORDINARY.fullmatch(value):
        return False
    return hashes or not (HASH.fullmatch(value) or SEVERAL_WORDS.fullmatch(value))


def mentions_cache(line: str, name: int) -> bool:
    """Whether a line speaks of a cache before a key, whose name begins there."""
    return bool(CACHE.search(line, max(name - NEAR, 0), name))


def is_passphrase(text: str) -> bool:
    """Whether a text is some words that make no sentence, as people choose for a passphrase."""
    chosen = text.split()
    if not 3 + text.replace(" ", "").isalpha() <= len(chosen) <= MOST_WORDS:
        return False
    return all(PHRASE_WORD.fullmatch(word) and word not in OF_SENTENCES for word in chosen)


def is_random(run: str) -> bool:
    """Whether nobody can have written it: small letters, capitals and digits all mixed."""
    if HEXLIKE.fullmatch(run) or run.startswith(("_Z", "__")):
        return False
    if NKEY.fullmatch(run):
        return True
    run = HEX_PART.sub("", run)
    pieces = [piece for piece in WORDS.split(run) if len(piece) >= LEAST_PIECE]
    return (
        len(run) >= LEAST_RANDOM
        and bool(pieces)
        and all(map(has_mixed_characters, ["".join(pieces), pieces[0]]))
    )


def has_mixed_characters(run: str) -> bool:
    kinds = ["d" if c.isdigit() else "u" if c.isupper() else "l" for c in run]
    changes = sum(a != b for a, b in pairwise(kinds))
    if len(set(kinds)) < len("dul") or changes < CHANGES * len(run):
        return False
    return kinds[0] != "u" or sum(map(len, CAMEL.findall(run))) < CLASS_NAME * len(run)


def is_generated(word: str) -> bool:
    """Whether a word beside the name of a secret is none that people or programs name things with.

    Args:
        word: without spaces and quotes.
    """
    if USUAL.fullmatch(word) or all(map(PIECE.fullmatch, SEPARATOR.split(word))):
        return False
    return bool(re.search(r"\d", word) and re.search(r"[A-Za-z]", word))


# -- where it ends ---------------------------------------------------------------------------


def strip_quotes(text: str, start: int, end: int) -> str:
    """A value without its quotes."""
    opening = OPENING.match(text, start, end)
    if not opening:
        return text[start:end]
    return text[opening.end() : end].rstrip("\\\"'`")


def find_value_end(
    text: str, start: int, stops: str = " \t\r\n,;&)]}\"'<>`", *, reach: int | None = REACH
) -> int:
    """Where the value that begins there ends: a quoted one, one in brackets, or a word.

    Args:
        text: what it is in.
        start: where it begins.
        stops: what ends a word.
        reach: how long one in brackets may be; a longer one counts as broken off.

    Returns:
        ``len(text) + 1`` where it is broken off.
    """
    opening = OPENING.match(text, start)
    if opening:
        if opening["mark"] is None:  # HTML's
            end = text.find(opening.group(), opening.end())
            return len(text) + 1 if end < 0 else end + len(opening.group())
        return find_quote_end(text, opening.end(), opening["mark"], len(opening["slashes"]))
    if start < len(text) and text[start] in CLOSING:
        return find_bracket_end(text, start, reach)
    at = start
    while at < len(text) and (text[at] not in stops or is_literal_bracket(text, at)):
        if text[at] in CLOSING and at > start:
            return find_bracket_end(text, at, reach)
        if text[at] == "\\" and text[at + 1 : at + 2] in {'"', "'", "n", "\\"}:
            return at
        at += 1
    return at


def is_literal_bracket(text: str, position: int) -> bool:
    """Whether a bracket as XML has them begins no tag, and is part of a word."""
    return text[position] == "<" and bool(re.match(r"<[\d!?.]", text[position : position + 2]))


def find_quote_end(text: str, start: int, mark: str, slashes: int) -> int:
    """The end of a quoted string as Python and JSON write them, in JSON that is in JSON, too.

    Args:
        text: what it is in.
        start: behind the quote that opens it.
        mark: that quote.
        slashes: how many backslashes stand before it.
    """
    at = start
    while (at := text.find(mark, at)) >= 0:
        before = at
        while before > start and text[before - 1] == "\\":
            before -= 1
        run = at - before
        at += len(mark)
        if run < slashes or ((run - slashes) // (slashes + 1)) % 2 == 0:
            line = text.find("\n", start, at)
            return at if line < 0 else line
    line = text.find("\n", start)
    return len(text) + 1 if line < 0 else line


def find_bracket_end(text: str, start: int, reach: int | None) -> int:
    """The end of what stands in brackets, with brackets and strings in it.

    Args:
        text: what it is in.
        start: where the bracket that opens it stands.
        reach: characters that are looked at; None for all.
    """
    last = len(text) if reach is None else min(start + reach, len(text))
    open_, at = [CLOSING[text[start]]], start + 1
    while match := BRACKET_OR_QUOTE.search(text, at, last):
        at, mark = match.end(), match[0]
        if mark in QUOTES:
            if text[at - 2] in "([{,:= bru":
                at = find_quote_end(text, at, mark, 0)
        elif mark in CLOSING:
            open_.append(CLOSING[mark])
        elif mark == open_[-1]:
            open_.pop()
            if not open_:
                return at
    return len(text) + 1


# -- how it is written -----------------------------------------------------------------------


def build_alternation(texts: Iterable[str], depth: int = 20) -> str:
    """A pattern for any of some texts, the longest first, that looks once at what they share.

    With hundreds of alternatives one after the other, a log takes ten times as long.

    Args:
        texts: any.
        depth: how deep groups in groups may be, which the library for patterns bounds.
    """
    texts = sorted(set(texts), reverse=True)
    if not depth:
        return "|".join(map(re.escape, texts))  # in this order none comes before a longer one
    start = commonprefix(texts)  # noqa: RUF071 - of characters, not of directories
    rest = [text[len(start) :] for text in texts]
    groups = groupby(filter(None, rest), key=itemgetter(0))
    parts = [build_alternation(group, depth - 1) for _, group in groups]
    if not parts:
        return re.escape(start)
    return f"{re.escape(start)}(?:{'|'.join(parts)}){'' if all(rest) else '?'}"


def list_written_forms(secret: str) -> Iterator[str]:
    """The forms in which a secret may be written down, those that nothing else has."""
    secret = secret.strip()
    whole = [] if secret.isdigit() and len(secret) < 2 * LEAST else [secret]
    lines = secret.splitlines()
    for text in whole + [line for line in lines if len(line) >= LEAST_LINE and len(lines) > 1]:
        if len(text) < LEAST or text == MARK or text.lower() in COMMON:
            continue
        content = text.encode(errors="surrogateescape")
        # Of what is no UTF-8 a log shows other characters.
        shown = {text, content.decode(errors="replace")}
        once = {form for one in shown for form in (one, *list_quoted_forms(one))}
        # JSON in JSON is not rare.
        yield from {*once, *(form for one in once for form in list_quoted_forms(one))}
        yield from {quote(content, safe=""), quote(content), quote_plus(content)}
        yield from {form for form in list_encoded_forms(text) if len(form) >= LEAST_CODED}


def list_quoted_forms(text: str) -> set[str]:
    """A text between quotes in JSON, with and without other alphabets, and in Python."""
    return {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]}


def list_encoded_forms(text: str) -> Iterator[str]:
    """A text in hex, and in base64 wherever in a longer one it begins."""
    content = text.encode(errors="surrogateescape")
    yield content.hex()
    yield content.hex().upper()
    for offset, skip in ((0, 0), (1, 2), (2, 3)):
        # The last character holds bits of what follows.
        whole = (offset + len(content)) * 8 // 6
        coded = base64.b64encode(bytes(offset) + content).decode()[skip:whole]
        yield coded
        yield coded.translate({ord("+"): "-", ord("/"): "_"})
