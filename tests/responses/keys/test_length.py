"""What a carrier's length tells: an attack on it, by somebody who writes a part of it."""

from __future__ import annotations

import itertools
import json
import random
import secrets
import statistics
import string
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from vllmops_responses.keys import carrier
from vllmops_responses.keys.keyring import generate_secret, make_single_key_ring

from ...support.extent import EVERYTHING, long, sample_cases

RING = make_single_key_ring(generate_secret())
ALPHABET = string.ascii_uppercase + string.digits
KNOWN = "The door code is "
CODE = "K7QX2M9ZP"
SECRET = f"{KNOWN}{CODE}."
BESIDE = carrier.SALT_BYTES + carrier.TAG_BYTES
CHANCE = 4  # of nine characters: five or more by chance are one in 500,000

Item = dict[str, Any]
Say = Callable[[str], list[Item]]


def message(role: str, *texts: str) -> Item:
    parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "role": role, "content": parts}


def output(*texts: str) -> Item:
    item = {"type": "function_call_output", "call_id": "call_1"}
    return {**item, "output": texts[0] if len(texts) == 1 else message("", *texts)["content"]}


# Where the secret stands, and where what an attacker says.
PLACES: dict[str, Callable[[str, str], list[Item]]] = {
    "developer": lambda secret, words: [message("developer", secret), message("user", words)],
    "plain": lambda secret, words: [
        {"role": "system", "content": secret},
        {"role": "user", "content": words},
    ],
    "earlier turn": lambda secret, words: [
        message("user", secret),
        message("assistant", "Yes."),
        message("user", words),
    ],
    "later": lambda secret, words: [message("user", words), message("developer", secret)],
    "tool output": lambda secret, words: [output(secret), message("user", words)],
    "attacker is the tool": lambda secret, words: [message("developer", secret), output(words)],
    "another part": lambda secret, words: [message("user", secret, words)],
    "another part of an output": lambda secret, words: [output(secret, words)],
}


# The attack takes a while: without --all it is tried on these.
ATTACKED = [*PLACES] if EVERYTHING else ["developer", "tool output", "another part"]


def length(history: list[Item]) -> int:
    # At one moment: the digits of the next second may compress otherwise.
    return len(carrier.seal_history(history, RING, model="m", owner="o", now=1.8e9))


def before(history: list[Item]) -> int:
    """As carriers were made when they were an oracle: to see that the attack is one."""
    return len(zlib.compress(json.dumps(history).encode(), 1))


def fillers() -> Iterator[str]:
    """Text that does not compress, longer and longer: it finds the edge of a bucket."""
    chance = random.Random(7)
    return itertools.accumulate(
        (chance.choice(string.ascii_letters + string.digits) for _ in itertools.count()), initial=""
    )


def guess_code(
    say: Say, measure: Callable[[list[Item]], int], *, tries: int, step: int = 1
) -> tuple[str, int]:
    """Guess the code, a character at a time, by what is shortest over fillers and repetitions.

    Args:
        say: the conversation around what the attacker says.
        measure: its length.
        tries: for each character that might be next.
        step: bytes of filler from one try to the next.

    Returns:
        The guess, and how many carriers it took.
    """
    noise = list(itertools.islice(fillers(), 0, tries * step, step))
    guess, count = "", 0
    for _ in CODE:
        scores = {}
        for candidate in ALPHABET:
            words = KNOWN + guess + candidate
            scores[candidate] = sum(measure(say(words + "\n" + filler)) for filler in noise)
            count += len(noise)
        guess += min(scores, key=scores.__getitem__)
    return guess, count


def count_right_letters(guess: str) -> int:
    return sum(a == b for a, b in zip(guess, CODE, strict=True))


def together(secret: str, words: str) -> list[Item]:
    """An application that puts both into one text."""
    return [message("developer", "Be brief."), message("user", f"{secret} Question: {words}")]


@pytest.fixture
def seeded_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that is the same in each run: what chance could do once in 500,000 it does never."""
    chance = random.Random(5)
    drawn = SimpleNamespace(token_bytes=chance.randbytes, randbelow=chance.randrange)
    monkeypatch.setattr(carrier, "secrets", drawn)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths to the byte, without noise and without buckets."""
    monkeypatch.setattr(carrier, "NOISE_BYTES", 1)
    monkeypatch.setattr(carrier, "round_to_bucket", int)


@pytest.mark.parametrize("place", PLACES)
def test_the_attack_is_one(place: str) -> None:
    guess, _ = guess_code(partial(PLACES[place], SECRET), before, tries=8)
    assert count_right_letters(guess) >= 7


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("bare")
def test_carrier_length_reveals_no_match_with_a_secret(place: str) -> None:
    other = KNOWN + "0ABCDEFGH."
    words = [KNOWN + CODE[:n] + more for n in range(9) for more in ("", CODE[n], "!", '},{"a":"')]
    differences = {
        length(PLACES[place](SECRET, item)) - length(PLACES[place](other, item)) for item in words
    }
    assert len({difference // 4 for difference in differences}) == 1  # base64's own rounding


@pytest.mark.parametrize("place", sample_cases(ATTACKED, 3))
@pytest.mark.usefixtures("seeded_noise")
def test_the_attack_finds_nothing(place: str) -> None:
    """Fillers sweep a whole bucket, so that its edge is among them."""
    guess, count = guess_code(partial(PLACES[place], SECRET), length, tries=32, step=9)
    assert count > 10_000
    assert count_right_letters(guess) <= CHANCE


@long
@pytest.mark.usefixtures("bare")
def test_within_one_text_the_attack_needs_silence() -> None:
    guess, _ = guess_code(partial(together, SECRET), length, tries=24)
    assert count_right_letters(guess) >= 7


@pytest.mark.usefixtures("seeded_noise")
def test_within_one_text_noise_stands_against_it() -> None:
    guess, _ = guess_code(partial(together, SECRET), length, tries=32, step=9)
    assert count_right_letters(guess) <= CHANCE


def test_lengths_are_few() -> None:
    chance = random.Random(3)
    lengths = {
        len(carrier.compress_and_pad(json.dumps([chance.randbytes(size).hex()]).encode())) + BESIDE
        for size in [*range(0, 2_000, 14), *(chance.randrange(100_000) for _ in range(400))]
    }
    assert len(lengths) < 2**7
    assert lengths == set(map(carrier.round_to_bucket, lengths))
    every = {
        carrier.round_to_bucket(2**n + m * 2**n // 64) for n in range(8, 26) for m in range(64)
    }
    assert len(every) < 2**8


@pytest.mark.usefixtures("seeded_noise")
def test_length_padding_has_a_bounded_cost() -> None:
    """A kilobyte at most where a conversation is short, a sixteenth beyond noise where not."""
    short = [message("user", "What is the door code?"), message("assistant", "I can't tell.")]
    costs = [length(short) - before(short) * 4 / 3 for _ in range(50)]
    assert statistics.mean(costs) < 1_000
    long = [message("user", random.Random(n).randbytes(2_000).hex()) for n in range(100)]
    assert length(long) < (before(long) * 17 / 16 + 2_000) * 4 / 3


@pytest.mark.parametrize("size", [0, 1, 23, 24, 255, 256, 4_095, 70_000, 5 << 20])
def test_whatever_is_padded_comes_back(size: int) -> None:
    history = [{"content": secrets.token_hex(size)}, {"n": [{}, {"a": 1}, {"b": '},{"'}]}]
    for _ in range(3):
        text = carrier.seal_history(history, RING, model="m", owner="o")
        assert carrier.unseal_carrier(text, RING, model="m", owner="o").history == history


@long
def test_many_tiny_objects_come_back_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is kept apart, which makes them longer than they were."""
    history = [{"a": n % 10} for n in range(100_000)]
    text = carrier.seal_history(history, RING, model="m", owner="o")
    assert carrier.unseal_carrier(text, RING, model="m", owner="o").history == history
    monkeypatch.setattr(carrier, "MOST_BYTES", 1 << 20)
    with pytest.raises(carrier.CarrierError) as caught:
        carrier.seal_history(history, RING, model="m", owner="o")
    assert caught.value.case == carrier.CarrierProblem.TOO_LARGE
