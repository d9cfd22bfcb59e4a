"""Takes what users and models said out of a log's lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from .secret_forms import MARK
from .secret_values import NOTHING, QUOTE, find_value_end

KIND = "prompt or answer"
# What stands before a prompt or an answer in vLLM's log lines, and in requests as they are quoted.
SAID = re.compile(
    r"(?<![\w-])(?:prompts?|outputs?|inputs?|content|messages|texts?|instructions|query|queries"
    r"|documents|(?:prompt_|output_|input_)?token_ids|input_ids|input_value|response_body|body"
    r"|reasoning(?:_content)?|arguments|delta|tool_calls|system|file_data|bad_words|user_input"
    r"|(?:user|system|chat|assistant|input|output|generated|last|raw|full)[ _](?:prompt|message"
    r"|text|input|query|content|question|request|output|completion|answer)|refusal|suffix|question"
    r"|completion|structured_outputs)"
    rf"{QUOTE}?\s{{0,2}}[:=]\s?(?=[bru]{{0,2}}{QUOTE}|[\[{{(]|[a-zA-Z]\w{{0,60}}\()"
    r"|(?:JSON body:|\b[Rr]equest|\b[Rr]esponse:) (?=\{)"
    # In sentences: The prompt '…' is too long.
    r"|\b(?i:prompts?|user (?:said|asked|wrote|input|message|text|query|question)|inputs?|messages?"
    r"|question|query|texts?|conversation|completion|user|answer|content|string|sentence"
    r"|transcript|document)(?: is| was| of| reads| contains| text| string| content)? "
    r"(?=[bru]?[\"'`][^\"'`\n]{0,60}(?:[\s!?,;]|[.:][\s\"'`])|[bru]?[\"'`][^\"'`\n]{40})"
)
# The rest of the line, whatever it is, and those that go on with it.
WHOLE = re.compile(
    r"(?<![\w-])(?:input |final |text |user |system |rendered |chat )?prompt(?: text)?: "
    r"(?!None|\[redacted|[\"'\[{(]|\d+(?:\D|$))",
    re.IGNORECASE,
)
SPECIAL = re.compile(r"[\"'](?:<\|\w{1,40}\|>|</?[a-z]{1,10}>)[\"']")  # a model's token
ENTRY = re.compile(
    r"(?P<process>\([\w.-]+ pid=\d+\) ?)?"
    r"(?P<head>[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? \[[^\]]*\])?"
)
OTHER_ENTRY = re.compile(r"(?:INFO|WARNING|ERROR|DEBUG|CRITICAL|Traceback)\b[: (]")
# Whatever an exception quotes that has several words may be what a user wrote.
RAISED = re.compile(
    r"(?:^|[\s\]])(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Warning|Failure|Interrupt|Exit)\b.{0,3}: "
)
WORDS = re.compile(
    r"(?<![\w\"'])(?:(\")(?=[^\"\s]{1,40}(?:\s[^\"\s]{1,40})\s)|(')(?=[^'\s]{1,40}(?:\s[^'\s]{1,40})\s))"
)
WORDS_END = re.compile(r"(?=[\s.,:;)\]}!?]|$)")
ORDINARY_WORDS = re.compile(r"[\"'](?:[\w.]+ object has no|dict object|NoneType)")


def redact_prompts(lines: Iterable[str], counts: Counter[str]) -> Iterator[str]:
    """Lines of a log without prompts and answers, as many as there were; counts what went."""
    hiding: dict[str, str] = {}  # by process: how the entry began that goes on
    for line in lines:
        entry = ENTRY.match(line)
        assert entry is not None  # both parts are optional
        process, head = entry["process"] or "", entry["head"] or ""
        # vLLM begins each further line of an entry as it began the first.
        if hiding.get(process) == head and not OTHER_ENTRY.match(line, entry.end()):
            yield f"{entry.group()} {MARK}".lstrip()
            continue
        said, whole = redact_quoted_prompts(line, counts)
        hiding.pop(process, None)
        if not whole:
            hiding[process] = head
        yield redact_exception(said, counts)


def redact_quoted_prompts(line: str, counts: Counter[str]) -> tuple[str, bool]:
    """A line without what was said, and whether that ended with the line."""
    pieces, whole, at = [], True, 0
    while whole and (match := SAID.search(line, at)):
        if WHOLE.match(line, match.start()):
            break  # it looks like a call, and may be one in a prompt's first words
        end = find_value_end(line, match.end(), reach=None)
        sentence = match[0][-2:-1] not in {":", "="} and match[0].endswith(" ")
        if sentence and end > len(line):
            # An apostrophe, maybe: no entry goes on because of it.
            end = len(line)
        if not (
            NOTHING.fullmatch(line, match.end(), end) or SPECIAL.fullmatch(line, match.end(), end)
        ):
            counts[KIND] += 1
            pieces += [line[at : match.end()], MARK]
            whole = end <= len(line)
        else:
            pieces.append(line[at:end])
        at = min(end, len(line))
    line = "".join(pieces) + line[at:]
    if match := WHOLE.search(line):
        counts[KIND] += 1
        return line[: match.end()] + MARK, False
    return line, whole


def redact_exception(line: str, counts: Counter[str]) -> str:
    """A line that tells an exception without the sentences that are quoted in it."""
    raised = RAISED.search(line) if "Error" in line or "Exception" in line else None
    if not raised:
        return line
    pieces, at = [line[: raised.end()]], raised.end()
    while match := WORDS.search(line, at):
        end = find_closing_quote(line, match.end(), match[0])
        if end < 0:
            break
        if not ORDINARY_WORDS.match(line, match.start()):
            counts[KIND] += 1
            pieces += [line[at : match.start()], MARK]
        else:
            pieces.append(line[at:end])
        at = end
    return "".join(pieces) + line[at:]


def find_closing_quote(line: str, start: int, mark: str) -> int:
    """Behind the quote that closes what begins there, which an apostrophe doesn't; -1: nowhere."""
    at = start
    while (at := line.find(mark, at)) >= 0:
        at += 1
        if WORDS_END.match(line, at):
            return at
    return -1
