"""Words that nobody made up by hand, in lines that speak of a secret, however the line is written.

Whoever writes a line may put its name and its secret anywhere. So the form of a line doesn't count
here: a word that looks generated goes if the name of a secret stands near it, unless the words
before it tell that it is something else: a hash, an id, a path.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from .secret_names import STEMS, STRONG, Secrecy, classify_name
from .secret_names import WORD as PARTS
from .secret_values import HASH, USUAL, UUID, is_generated, is_passphrase, is_random, mentions_cache

__all__ = [
    "WORD",
    "find_labelled_secret",
    "find_lone_secret",
    "find_nearby_secrets",
    "is_unusual_word",
]

AROUND = 200  # characters
BEFORE_LENGTH = 42
BEFORE = re.compile(r"(?<![\w.-])((?:[A-Za-z]{1,20}[ -]){1,2})$")
NAME = re.compile(
    rf"(?<![^\W_])(?=[\w-]{{0,100}}?(?i:{'|'.join(STEMS)}))[^\W\d_][\w-]*+(?!\.(?:py|json|ya?ml|toml|log)\b)"
)
# Of an access, which something secret gives.
ACCESS = re.compile(
    r"(?i)(?:log-?[io]n|sign-?in|o?auth2?|oidc|sso|saml|sasl|ldap|unauthori[sz]ed|grant|refresh|vault|key(?:ring|chain|store|tab|vault|file))"
)
WORD = re.compile(r"(?:[A-Za-z0-9!?@#$%^*+~_./-]|&(?![\w.-]+=)){8,200}={0,2}")
BASE64 = re.compile(r"[A-Za-z0-9+/]{20,}={0,2}")
PREFIX = re.compile(r"[A-Za-z_-]{2,40}[_-](?=.{8})")
POD = re.compile(
    r"(?:kube(?:-[a-z]+)+|(?:[a-z]+-){1,4}token)-[a-z\d]{5}"
)  # Kubernetes' names for what it makes
PART = re.compile(r"[^/]+")
# What tells, before a word, that it is something else than a secret.
ELSE = re.compile(
    r"(?i)(?:(?<![A-Za-z])|(?-i:(?=[A-Z])))(?:hash|sha-?\d*|md5|digest|etag|checksum|fingerprint|block|cache|commit|revision|rev"
    r"|snapshot|ids?|uuid|guid|request|req|response|resp|trace|span|parent|session|container|image"
    r"|pod|node|gpu|mig|device|host|hostname|server|engine|model|tokenizer|version|file|path|url"
    r"|layer|tensor|weights?|dtype|backend|time|date|created|expires|at|user|username|owner|group"
    r"|region|name|branch|tag|build|address|addr|pid|thread|rank|job|run|task|worker|shape"
    r"|algorithm|machine|arch|os|kernel|package|wheel|public[ _-]key"
    r"|pubkey|metric|label|bucket)s?\W{0,4}$"
)
FAR_ELSE = re.compile(
    r"(?i)(?<![A-Za-z])(?:hash|sha\d|md5|digest|checksum|fingerprint|block|cache|commit|revision|request"
    r"|snapshot|trace|uuid|chatcmpl|resp)(?![a-z])[^,;]*$"
)
ELSE_BEFORE = 60  # characters
# The value of a name of its own: ``name=``, ``"name": ``.
OF_ANOTHER = re.compile(
    r"(?<![\w.-])(?!(?i:val(?:ue)?|v|k|data|string|text|content|body|raw|plain|literal|material)\b)"
    r"[\w.-]+(?:=|[\"']\s?:\s?)[bru]?[\"'`(\[{<]{0,3}$"
)
# What people make up is a secret where it is said to be one.
SAID = re.compile(
    r"(?i)(?:[:>\uff1a]|(?:^|\s)=|\b(?:is|was|be|to|as|with|using|now|ist|lautet|war|est|es|era|\u00e9|e))"
    r"[\s\"'`(\[*]{1,4}$"
)
MADE_UP = re.compile(
    r"(?=\S*\d)(?=\S*[a-z])(?=\S*[A-Z])\S{8,}|(?=\S*[A-Za-z])(?=\S*\w[!@#$%^*&~])\S{8,}"
    r"|[A-Za-z]{5,}\d{2,}|[A-Za-z]+(?:-[A-Za-z]+){2,}-\d+|[a-z]{3,}(?:-[a-z]{3,}){3,}"
)
TURN = re.compile(r"[a-z][A-Z]|[A-Z]{2}[a-z]")
# Each capital begins a part, so that there is one way to read a word.
CLASS = re.compile(r"k?(?:[A-Z][a-z]*\d{0,2})+")
# Names in code, and of versions of an API.
DOTTED = re.compile(
    r"[A-Za-z_]+(?:\.(?:[A-Za-z_]+(?:\d[A-Za-z_]*)?|v?\d{1,2}(?:(?:alpha|beta)\d)?))+"
)
CLASS_PART = re.compile(r"[A-Z][a-z]{3,}")
NUMBERED_CLASS = re.compile(r"(?:[A-Z][a-z]{3,}){2,}\d{2,}")  # AmberOrbit51
TURNS = 3  # between small letters and capitals, as hardly a name has them; digits count as one
GROUPS = re.compile(r"(?=\S*[A-Za-z])(?!\S*\dGB$)(?:[A-Za-z0-9]{4,}-){2,}[A-Za-z0-9]{4,}")
NUMBERED = re.compile(r"(?:[A-Za-z]{3,}-){2,}\d{1,4}")  # word-Word-12
SHORTEST, LONG = 8, 12
RIGHTS = re.compile(
    r"(?i)(?<![a-z])(?:api|secret|password|credential|(?:en|de)crypt|(?:un)?auth(?!or)|log ?in"
    r"|s3|sign|leak|rotat|revok)(?:s|e|ed|ing|ion|enticat\w+)?(?![a-z])"
)
# A word that is all of a line, or all but a label: `data: X`, `<dd>X</dd>`, `string(20) "X"`.
LABELLED = re.compile(
    r"\s*(?:[>*#$-]\s+)?"
    r"(?P<label><?[\"'$]?[A-Za-z\d][\w .()\[\]-]{0,40}[\"']?\s{0,30}(?:[:=>]+|(?<=[)]))\s*)?"
    r"(?:0x[0-9a-f]+ )?"
    r"[\"'`(]?(?P<word>[^\s\"'`<>,;|()\[\]{}]{8,200})(?:</[\w:.-]+>|[\"'`),;.])*\s*$"
)
# `<bob> X`, `"bob" "X"`
ANSWER = re.compile(
    r"(?:\[[\d:. -]+\]\s)?"
    r"(?:<[\w .-]{1,40}>\s|[\w.-]{1,40}:\s|\"[\w.@-]{1,60}\"\s(?=\"))\"?"
    r"(?P<word>[^\s\"]{6,200})\"?\s*$"
)
BEGINS = {":", "=", ">", "|"}
DEFAULT = re.compile(r"\(default: ([a-z\d ]+)\)$")
ERROR = re.compile(r"(?:Error|Exception): $")


def find_nearby_secrets(line: str) -> Iterator[tuple[int, int]]:
    """Where the words stand that look generated, and have the name of a secret near them."""
    found = [(start, end, line[start:end]) for start, end in find_candidates(line)]
    if not found:
        return
    names = [
        (*name.span(), what)
        for name in NAME.finditer(line)
        if (what := classify_name_in_line(line, name))
    ]
    for start, end, word in found if names else ():
        around = max(
            (
                what
                for first, last, what in names
                if first - AROUND <= start <= last + AROUND and start != first
            ),
            default=Secrecy.NONE,
        )
        # What stands before a secret's name tells nothing of what follows it.
        since = max(
            (last for _, last, what in names if last <= start and what is Secrecy.SECRET), default=0
        )
        if around and is_secret_near_name(line, start, word, around, since):
            yield start, end


def classify_name_in_line(line: str, match: re.Match[str]) -> Secrecy:
    """What a name says; of several tokens and keys a model's are meant, or a cache's."""
    name = match[0]
    parts = {part.lower() for part in PARTS.findall(name)}
    if parts & STRONG:
        return Secrecy.SECRET
    before = BEFORE.search(line, max(match.start() - BEFORE_LENGTH, 0), match.start())
    what = classify_name(name, before[1] if before else "")
    if what < Secrecy.LIKELY and any(map(ACCESS.fullmatch, parts)):
        return Secrecy.LIKELY
    if what < Secrecy.LIKELY and mentions_cache(line, match.start()):
        return Secrecy.NONE
    several = name.endswith("s") and not name.endswith("ss")
    return Secrecy.NONE if what < Secrecy.SECRET and several else what


def find_candidates(line: str) -> Iterator[tuple[int, int]]:
    """The words of a line that may be secrets, of a path its parts."""
    for match in WORD.finditer(line):
        start, word = match.start(), match[0].rstrip(".?")
        start, word = start + len(word) - len(word.lstrip("*")), word.lstrip("*")
        if line[match.end() : match.end() + 1] == "(" or POD.fullmatch(word):  # a call
            continue
        if (prefixed := PREFIX.match(word)) and classify_name(prefixed[0]) >= Secrecy.LIKELY:
            start, word = start + prefixed.end(), word[prefixed.end() :]
        whole = BASE64.fullmatch(word) and not classify_name(word.partition("/")[0])
        if "/" not in word or (whole and is_random(word.replace("/", ""))):
            if is_unusual_word(word):
                yield start, start + len(word)
            continue
        before = ""
        for part in PART.finditer(word):
            if (
                classify_name(before) >= Secrecy.LIKELY or ACCESS.fullmatch(before)
            ) and is_unusual_word(part[0]):
                yield start + part.start(), start + part.end()
            before = part[0]


@functools.lru_cache(4096)
def is_unusual_word(word: str) -> bool:
    """Whether a word is none of a language, nor a name that people give."""
    if (
        len(word) < SHORTEST
        or word.isdigit()
        or (USUAL.fullmatch(word) and not UUID.fullmatch(word))
    ):
        return False
    if DOTTED.fullmatch(word):
        return False
    if CLASS.fullmatch(word) and sum(map(len, CLASS_PART.findall(word))) >= len(word) / 2:
        return bool(NUMBERED_CLASS.fullmatch(word))
    return bool(
        is_machine_made(word)
        or HASH.fullmatch(word)
        or UUID.fullmatch(word)
        or MADE_UP.fullmatch(word)
    )


@functools.lru_cache(4096)
def is_machine_made(word: str) -> bool:
    """Whether a word looks generated: by its letters, or by groups of the same length."""
    digit, capital = bool(re.search(r"\d", word)), word != word.lower()
    return (
        is_generated(word)
        or len(TURN.findall(word)) + digit >= TURNS
        or (capital and bool(NUMBERED.fullmatch(word)))
        or (digit and bool(GROUPS.fullmatch(word)) and len(set(map(len, word.split("-")))) == 1)
    )


@functools.lru_cache(2)
def mentions_access(line: str) -> bool:
    """Whether a line speaks of rights; asked for each of its words."""
    return bool(RIGHTS.search(line))


def find_part_ends(word: str) -> Iterator[int]:
    """Where the parts of a word end that hyphens join."""
    return (sign.end() for sign in re.finditer("-", word))


def is_secret_near_name(
    line: str, start: int, word: str, name_secrecy: Secrecy, context_start: int = 0
) -> bool:
    """Whether an odd word near a name is a secret, by what is before it from ``context_start``."""
    before = line[max(start - ELSE_BEFORE, context_start) : start]
    # What it is may stand in the word itself: node-7f9b2c.
    if any(ELSE.search(before + word[:end]) for end in (0, *find_part_ends(word))):
        return False
    if HASH.fullmatch(word) or UUID.fullmatch(word):
        if FAR_ELSE.search(before) or (name_secrecy < Secrecy.LIKELY and OF_ANOTHER.search(before)):
            return False
        return name_secrecy >= Secrecy.LIKELY or mentions_access(line)
    if is_machine_made(word):
        return name_secrecy >= Secrecy.LIKELY or len(word) >= LONG or mentions_access(line)
    if name_secrecy is Secrecy.SECRET and NUMBERED.fullmatch(word):
        return True
    quoted = before[-1:] in set("\"'`(>") and not OF_ANOTHER.search(before)
    return name_secrecy is Secrecy.SECRET and (quoted or bool(SAID.search(before)))


def find_lone_secret(
    line: str, preceding_lines: Sequence[str], following_lines: Iterable[str]
) -> int | None:
    """Where a secret begins that stands alone in a line below one that names it.

    Of an exception that tells nothing else (`KeyError: 'X'`), the name may be below it, too.
    """
    if start := find_prompted_secret(line, preceding_lines, following_lines):
        return start
    match = LABELLED.match(line)
    if not match or not is_unusual_word(match["word"]):
        return None
    raised = bool(match["label"] and ERROR.search(match["label"]))
    if match["label"] and not raised:
        return None
    for other in (*preceding_lines, *(islice(following_lines, 1) if raised else ())):
        kinds = [classify_name_in_line(other, name) for name in NAME.finditer(other)]
        if max(kinds, default=Secrecy.NONE) >= Secrecy.LIKELY and not FAR_ELSE.search(other):
            return match.start("word")
    return None


def find_prompted_secret(
    line: str, preceding_lines: Sequence[str], following_lines: Iterable[str]
) -> int | None:
    """Where a passphrase begins below its name, or what somebody answers who was asked for it."""
    above = preceding_lines[-1].rstrip() if preceding_lines else ""
    below = next(iter(islice(following_lines, 1)), "").lstrip()
    asked = above if above.endswith("?") else below if below[:1] in {";", "#"} else ""
    if asked and (match := ANSWER.match(line)) and has_secret_name(asked):
        word = match["word"]
        if not (word.isalpha() or (USUAL.fullmatch(word) and not UUID.fullmatch(word))):
            return match.start("word")
    text = line.strip().strip("\"'")
    if above[-1:] in BEGINS and is_passphrase(text) and has_secret_name(above):
        return line.index(text)
    match = DEFAULT.search(line) if "(default: " in line else None
    if match and is_passphrase(match[1]) and has_secret_name(above):
        return match.start(1)
    return None


def has_secret_name(line: str) -> bool:
    """Whether a line names a secret, whatever else it says."""
    return any(classify_name_in_line(line, name) is Secrecy.SECRET for name in NAME.finditer(line))


def find_labelled_secret(line: str, name_secrecy: Secrecy) -> int | None:
    """Where a secret begins in a line of what has the name of one; ``name_secrecy`` that says."""
    match = LABELLED.match(line)
    if not match or not is_unusual_word(match["word"]):
        return None
    start = match.start("word")
    made_up = name_secrecy is Secrecy.SECRET and MADE_UP.fullmatch(match["word"])
    return (
        start if made_up or is_secret_near_name(line, start, match["word"], name_secrecy) else None
    )
