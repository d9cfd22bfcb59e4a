"""The table of forms, and what comes through: each secret in each place, and harmless lines."""

from __future__ import annotations

import base64
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from urllib.parse import quote

import pytest

from vllmops.redaction.redactor import MARK, Redactor
from vllmops.redaction.secret_forms import FORMS, SecretForm

from ..support.extent import EVERYTHING
from . import secret_examples

SEED = 20261122
ALLOWED_DAMAGE = 2
SECRETS = 150
WAYS: list[Callable[[Redactor, str], str]] = [
    Redactor.redact_text,
    Redactor.redact_log,
    Redactor.redact_server_log,
]
DRAWS = 27 if EVERYTHING else 9  # of each kind of value one at least
TURNS = len(WAYS)  # in the short form each name meets each carrier in one of the ways


def draw() -> random.Random:
    return random.Random(SEED)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.name}: {form.goes[:20]}")
def test_each_secret_form_is_redacted_and_its_lookalike_kept(form: SecretForm) -> None:
    drawn = draw()
    for _ in range(DRAWS):
        text = secret_examples.fill_example(form.goes, drawn)
        assert any(has in text.lower() for has in form.has)
        assert form.pattern.search(text), text
        shown = Redactor().redact_text(f"at first {text} and last")
        hidden = max(re.findall(r"[A-Za-z0-9+]+", text), key=len)
        if form.pattern.flags & re.MULTILINE or form.goes.startswith("password"):
            shown = Redactor().redact_text(text)
        assert hidden not in shown
    assert Redactor().redact_text(form.stays) == form.stays


def test_no_pattern_keeps_more_than_its_beginning() -> None:
    for form in FORMS:
        assert set(form.pattern.groupindex) <= {"keep"}, form.name


def report(left: Counter[str], of: int) -> str:
    return f"{sum(left.values())} of {of} come through: {left.most_common(40)}"


def iterate_named_values(turn: int) -> Iterator[tuple[str, str]]:
    """Names and values: of the names some, or all."""
    values = secret_examples.values(draw())
    for name in (
        secret_examples.NAMES if EVERYTHING else secret_examples.NAMES[turn % TURNS :: TURNS]
    ):
        for value in islice(values, 2):
            yield name, value


def is_hidden(shown: str, value: str) -> bool:
    """Whether neither a value nor half of it can be seen, as it is or as it is written."""
    half = value[: max(len(value) // 2, 5)]
    forms = {value, value[::-1], quote(value, safe=""), json.dumps(value)[1:-1]}
    forms |= {base64.b64encode(value.encode()).decode(), half}
    return not any(form in shown for form in forms)


@pytest.mark.parametrize("carrier", secret_examples.NAMED)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_secrets_with_a_name(carrier: str, way: Callable[[Redactor, str], str]) -> None:
    write, left, count = secret_examples.NAMED[carrier], Counter[str](), 0
    for name, value in iterate_named_values(
        WAYS.index(way) + [*secret_examples.NAMED].index(carrier)
    ):
        count += 1
        if not is_hidden(way(Redactor(), write(name, value)), value):
            left[f"{name} {value}"] += 1
    assert count >= (SECRETS if EVERYTHING else SECRETS // TURNS)
    assert not left, report(left, count)


@pytest.mark.parametrize("carrier", secret_examples.ALONE)
def test_secrets_with_a_form(carrier: str) -> None:
    write, left, count, drawn = secret_examples.ALONE[carrier], Counter[str](), 0, draw()
    for _ in range(2):
        for name, (text, part) in secret_examples.tokens(drawn).items():
            count += 1
            if part in Redactor().redact_text(write(text)):
                left[f"{name} {text}"] += 1
    assert count >= SECRETS
    # Some are known by where in a line they stand.
    assert not {item for item in left if not item.startswith(("login", "header"))}, report(
        left, count
    )


@pytest.mark.parametrize("sentence", secret_examples.SENTENCES)
def test_secrets_in_sentences(sentence: str) -> None:
    left, values = Counter[str](), list(islice(secret_examples.values(draw()), DRAWS))
    for value in values:
        if "#" in value and "://" in sentence:
            value = quote(value, safe="")  # noqa: PLW2901 - as it has to be in a URL
        for line in (sentence, f"(APIServer pid=7) ERROR 11-20 19:05:14 [x.py:1] {sentence}"):
            if line != sentence and sentence.startswith(" "):
                continue
            if not is_hidden(Redactor().redact_text(line.replace("¤", value)), value):
                left[line.replace("¤", value)] += 1
    assert not left, report(left, len(values))


def test_private_keys_of_several_lines() -> None:
    drawn = draw()
    for kind in ("", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED "):
        key, body = secret_examples.pem(drawn, kind)
        head = "(APIServer pid=7) INFO 11-20 19:05:14 [x.py:1] "
        for text in (
            key,
            json.dumps({"tls": key}),
            repr({"tls": key}),
            json.dumps(json.dumps({"tls": key})),
            "tls: |\n" + "\n".join(f"  {line}" for line in key.splitlines()),
            "\n".join(f"(APIServer pid=7) {line}" for line in key.splitlines()),
            f"tls.key: {base64.b64encode(key.encode()).decode()}",
        ):
            shown = Redactor().redact_text(f"{head}before\n{text}\n{head}after")
            assert not [line for line in body if line[:20] in shown]
            assert shown.startswith(f"{head}before\n")
            assert shown.endswith(f"\n{head}after")


def test_harmless_lines_stay() -> None:
    assert len(secret_examples.HARMLESS) >= SECRETS
    for way in (Redactor.redact_text, Redactor.redact_log):
        damaged = [(line, way(Redactor(), line)) for line in secret_examples.HARMLESS]
        damaged = [(line, shown) for line, shown in damaged if line != shown]
        assert len(damaged) <= ALLOWED_DAMAGE, "\n".join(f"{a}\n  {b}" for a, b in damaged)


def test_known_secrets_however_they_are_written() -> None:
    left, count = Counter[str](), 0
    for secret in islice((x for x in secret_examples.values(draw()) if len(x) >= 10), SECRETS):
        count += 1
        redactor = Redactor([secret])
        for text in (
            secret,
            f"a{secret}b",
            quote(secret, safe=""),
            json.dumps(json.dumps({"x": secret})),
            secret.encode().hex(),
            secret.encode().hex().upper(),
            *(base64.b64encode(f"{'x' * n}{secret}yz".encode()).decode() for n in range(3)),
            *(base64.urlsafe_b64encode(f"{'x' * n}{secret}yz".encode()).decode() for n in range(3)),
        ):
            shown = redactor.redact_text(text)
            left[text] += shown == text or secret in shown or MARK not in shown
    assert not +left, report(+left, count)


def test_short_and_common_values_are_no_known_secrets() -> None:
    text = "true 1 abc default 12345 localhost production"
    assert Redactor(["1", "true", "abc", "default", "12345", "localhost"]).redact_text(text) == text
