"""The carrier: what is sealed comes back, and nothing else ever does."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import random
import tracemalloc
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from vllmops.support.errors import VllmopsError
from vllmops_responses.keys import carrier
from vllmops_responses.keys.carrier import (
    Carrier,
    CarrierError,
    CarrierProblem,
    is_vllm_carrier,
    seal_history,
    sign_history,
    unseal_carrier,
)
from vllmops_responses.keys.keyring import Key, KeyRing, KeyStatus, Secret, make_single_key_ring

from ...support.extent import EVERYTHING

NOW = 1_800_000_000
DAY_S = 24 * 3600
SECRET = bytes(range(32))
RING = make_single_key_ring(Secret(SECRET))
KID = "644808e1"
HISTORY = [{"role": "user", "content": "grün"}, {"role": "assistant", "content": "ok"}]
WHERE = {"model": "m", "owner": "o"}


def make_carrier(history: Any = HISTORY, ring: KeyRing = RING, **given: Any) -> str:
    return seal_history(history, ring, **{**WHERE, "now": NOW, **given})


def open_carrier(text: str, ring: KeyRing = RING, **given: Any) -> Carrier:
    return unseal_carrier(text, ring, **{**WHERE, "now": NOW, **given})


def expect_carrier_error(*cases: CarrierProblem) -> pytest.RaisesExc[CarrierError]:
    return pytest.raises(CarrierError, check=lambda error: error.case in cases)


# -- the formats, from their description alone -------------------------------------------------


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """RFC 5869."""
    extracted, block, made = hmac.digest(salt, secret, "sha256"), b"", b""
    while len(made) < length:
        block = hmac.digest(extracted, block + info + bytes([len(made) // 32 + 1]), "sha256")
        made += block
    return made[:length]


def key_and_nonce(secret: bytes, salt: bytes) -> tuple[AESGCM, bytes]:
    made = hkdf(secret, salt, b"vllmops carrier 2 a256gcm-zlib", 44)
    return AESGCM(made[:32]), made[32:]


def decode(text: str, secret: bytes) -> Any:
    """Format 2, read by somebody else."""
    head, body = text[: text.rindex(":") + 1], text[text.rindex(":") + 1 :]
    sealed = base64.urlsafe_b64decode(body + "==")
    cipher, nonce = key_and_nonce(secret, sealed[:16])
    return json.loads(zlib.decompress(cipher.decrypt(nonce, sealed[16:], head.encode())))


def encode(content: bytes, kid: str, secret: bytes = SECRET, salt: bytes = b"s" * 16) -> str:
    """Format 2, written by somebody else; `content` is what was compressed."""
    head = f"vllm:2:{kid}:a256gcm-zlib:"
    cipher, nonce = key_and_nonce(secret, salt)
    sealed = salt + cipher.encrypt(nonce, content, head.encode())
    return head + base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()


def sign(content: bytes, secret: bytes = SECRET) -> str:
    """Format 1, as #35903 makes it."""
    payload = base64.b64encode(content)
    return f"vllm:1:{payload.decode()}:{hmac.new(secret, payload, hashlib.sha256).hexdigest()}"


def test_another_program_reads_what_is_sealed() -> None:
    text = make_carrier()
    assert text.startswith(f"vllm:2:{KID}:a256gcm-zlib:")
    assert decode(text, SECRET) == {
        "iat": NOW,
        "exp": NOW + 30 * DAY_S,
        "model": "m",
        "owner": "o",
        "history": HISTORY,
    }
    payload, signature = sign_history(HISTORY, RING).removeprefix("vllm:1:").split(":")
    assert hmac.new(SECRET, payload.encode(), "sha256").hexdigest() == signature
    assert json.loads(base64.b64decode(payload)) == HISTORY


def test_carrier_sealed_by_another_program_is_read() -> None:
    content = {"iat": NOW, "exp": NOW + 9, "model": "m", "owner": "o", "history": HISTORY, "x": 1}
    text = encode(zlib.compress(json.dumps(content).encode(), 9), KID)
    assert open_carrier(text) == Carrier(
        format=2,
        kid=KID,
        issued_at=NOW,
        expires_at=NOW + 9,
        model="m",
        owner="o",
        history=HISTORY,
    )
    assert open_carrier(sign(json.dumps(HISTORY).encode())) == Carrier(
        format=1, kid=KID, history=HISTORY
    )


KNOWN_2 = (
    "vllm:2:644808e1:a256gcm-zlib:c3Nzc3Nzc3Nzc3Nzc3Nzc_phBcZK81_p3g8rAebPULahXicsn5U"
    "EiF1rX-8FXHObCyJB9HGi5o4MAwmbNYt6-WBkwCbLvxh8L_Yrd5T6UUkjvQs07ApqVT5BrXyRVmentg"
)
KNOWN_1 = (
    "vllm:1:W3sicm9sZSI6ICJ1c2VyIiwgImNvbnRlbnQiOiAiaGkifV0=:60bc029236e3218452e2fd2e"
    "a51d8239306509209b38e25fc0c59c6e543eebb2"
)


def test_known_answers() -> None:
    """Carriers as they were on the day when the formats were written down."""
    assert (
        encode(zlib.compress(b'{"iat":1,"exp":2,"model":"m","owner":"","history":[7]}', 0), KID)
        == KNOWN_2
    )
    assert sign(b'[{"role": "user", "content": "hi"}]') == KNOWN_1
    assert open_carrier(KNOWN_2, owner="", now=1.5).history == [7]
    assert open_carrier(KNOWN_1).history == [{"role": "user", "content": "hi"}]


# -- what is sealed comes back -----------------------------------------------------------------

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec=None)),
    lambda parts: st.lists(parts) | st.dictionaries(st.text(), parts),
    max_leaves=20,
)


@settings(max_examples=100 if EVERYTHING else 40)
@given(st.lists(values), st.text(), st.text())
def test_round_trip(history: list[Any], model: str, owner: str) -> None:
    text = make_carrier(history, model=model, owner=owner)
    assert text.isascii()
    assert open_carrier(text, model=model, owner=owner).history == history
    assert open_carrier(sign_history(history, RING)).history == history


def test_half_a_surrogate_pair() -> None:
    """JSON of a request may hold one; what it is has no UTF-8."""
    history = ["\ud800", "ä", {"\udfff": 1}]
    assert open_carrier(make_carrier(history)).history == history
    assert open_carrier(sign_history(history, RING)).history == history
    assert open_carrier(make_carrier([], owner="\ud800"), owner="\ud800").owner == "\ud800"


def test_two_are_never_the_same() -> None:
    assert make_carrier() != make_carrier()


def test_sealed_carrier_hides_its_content() -> None:
    text = make_carrier(["needle in a haystack"] * 3)
    body = base64.urlsafe_b64decode(text.rpartition(":")[2] + "==")
    for secret in (b"needle", b"history", b"model", zlib.compress(b"needle")[:4]):
        assert secret not in body
    assert "needle" in base64.b64decode(sign_history(["needle"], RING).split(":")[2]).decode()


# -- each thing that can be wrong --------------------------------------------------------------


def ring(*statuses: KeyStatus, not_after: int | None = None) -> KeyRing:
    keys = [Key.from_secret(Secret(bytes([n] * 32)), status) for n, status in enumerate(statuses)]
    return KeyRing(keys=tuple(msgspec.structs.replace(key, not_after=not_after) for key in keys))


@pytest.mark.parametrize("make", [make_carrier, sign_history])
@pytest.mark.parametrize(
    ("status", "not_after", "case"),
    [
        (KeyStatus.PRIMARY, None, None),
        (KeyStatus.NEXT, None, None),
        (KeyStatus.VERIFY_ONLY, None, None),
        (KeyStatus.VERIFY_ONLY, NOW, None),
        (KeyStatus.VERIFY_ONLY, NOW - 1, CarrierProblem.EXPIRED),
        (KeyStatus.REVOKED, None, CarrierProblem.REVOKED_KEY),
    ],
)
def test_key_status_decides_whether_a_carrier_opens(
    make: Any, status: KeyStatus, not_after: int | None, case: CarrierProblem | None
) -> None:
    text = make(HISTORY, ring(KeyStatus.PRIMARY))
    # The key that sealed it, among others.
    held = ring(status, KeyStatus.VERIFY_ONLY, KeyStatus.REVOKED, not_after=not_after)
    if case is None:
        assert open_carrier(text, held).history == HISTORY
    else:
        with expect_carrier_error(case) as caught:
            open_carrier(text, held)
        assert caught.value.code == f"carrier.{case}"
        assert caught.value.carrier
        assert caught.value.carrier.history == HISTORY


def test_no_key_that_seals() -> None:
    for make in (make_carrier, sign_history):
        with pytest.raises(VllmopsError, match="no primary key"):
            make(HISTORY, ring(KeyStatus.NEXT, KeyStatus.VERIFY_ONLY))


def test_an_unknown_key() -> None:
    other = make_single_key_ring(Secret(b"x" * 32))
    with expect_carrier_error(CarrierProblem.UNKNOWN_KEY):
        open_carrier(make_carrier(ring=other))
    # Format 1 names no key.
    with expect_carrier_error(CarrierProblem.TAMPERED):
        open_carrier(sign_history(HISTORY, other))
    with expect_carrier_error(CarrierProblem.UNKNOWN_KEY):
        open_carrier(make_carrier(), KeyRing())


def test_expired() -> None:
    text = make_carrier(ttl_s=10)
    assert open_carrier(text, now=NOW + 9.9)
    for late in (10, 11, DAY_S):
        with expect_carrier_error(CarrierProblem.EXPIRED):
            open_carrier(text, now=NOW + late)
    assert open_carrier(make_carrier(), now=NOW + 30 * DAY_S - 1)
    with expect_carrier_error(CarrierProblem.EXPIRED):
        open_carrier(make_carrier(), now=NOW + 30 * DAY_S)


def test_another_model_or_owner() -> None:
    text = make_carrier()
    with expect_carrier_error(CarrierProblem.OTHER_MODEL) as caught:
        open_carrier(text, model="m2")
    assert "m2" not in caught.value.message
    for other in ("", "p", "oo", "ö"):
        with expect_carrier_error(CarrierProblem.OTHER_OWNER):
            open_carrier(text, owner=other)
    with expect_carrier_error(CarrierProblem.OTHER_OWNER):
        open_carrier(make_carrier(owner=""))
    # Format 1 tells neither.
    assert open_carrier(sign_history(HISTORY, RING), model="m2", owner="p")


@pytest.mark.parametrize("text", ["", "gAAAAABpZtK3mH8xYz2kL9nP4qR7sT0uW", "VLLM:2:", "vllm", "ä"])
def test_foreign_text_is_not_a_carrier(text: str) -> None:
    assert not is_vllm_carrier(text)
    with expect_carrier_error(CarrierProblem.FOREIGN):
        open_carrier(text)


@pytest.mark.parametrize(
    "text",
    [
        "vllm:",
        "vllm:1:",
        "vllm:1::",
        f"vllm:1:W10=:{'A' * 64}",
        f"vllm:1:W10=:{'a' * 63}",
        f"vllm:1:W1_-:{'a' * 64}",
        "vllm:2:",
        "vllm:2::a256gcm-zlib:AAAA",
        f"vllm:2:{'k' * 65}:a256gcm-zlib:AAAA",
        "vllm:2:kid:a256gcm-zlib:",
        "vllm:2:kid:a256gcm-zlib:A",
        f"vllm:2:kid:a256gcm-zlib:{'A' * 40}",
        f"vllm:2:kid:a256gcm-zlib:{'A' * 400}=",
        f"vllm:2:kid:a256gcm-zlib:{'A' * 400}\n",
        f"vllm:2:kid:a256gcm-zstd:{'A' * 400}",
        f"vllm:2:kid:none:{'A' * 400}",
        f"vllm:3:kid:a256gcm-zlib:{'A' * 400}",
        "vllm:22:",
        "vllm:2:kid:a256gcm-zlib:Ä" + "A" * 400,
        "vllm:2:kid:a256gcm-zlib:\ud800" + "A" * 400,
    ],
)
def test_malformed(text: str) -> None:
    assert is_vllm_carrier(text)
    with expect_carrier_error(CarrierProblem.MALFORMED):
        open_carrier(text)


@pytest.mark.parametrize("make", [make_carrier, sign_history])
def test_every_flipped_bit_is_refused(make: Any) -> None:
    text = make([{"role": "user", "content": "hi"}], RING)
    open_carrier(text)
    for place, character in enumerate(text):
        for bit in range(8):
            flipped = text[:place] + chr(ord(character) ^ 1 << bit) + text[place + 1 :]
            with pytest.raises(CarrierError):
                open_carrier(flipped)


@pytest.mark.parametrize("make", [make_carrier, sign_history])
def test_every_cut_and_every_splice_is_refused(make: Any) -> None:
    one, other = make(["one"], RING), make(["two"], RING)
    cuts = [one[:end] for end in range(len(one))] + [one[start:] for start in range(1, len(one))]
    cuts += [one[:at] + one[at + 1 :] for at in range(len(one))]
    cuts += [one[:at] + one[at] + one[at:] for at in range(len(one))]
    cuts += [one + more for more in ("A", "=", "==", " ", "\n", ":", one)]
    splices = [one[:at] + other[at:] for at in range(len(one))]
    for text in cuts + [item for item in splices if item not in (one, other)]:
        with pytest.raises(CarrierError):
            open_carrier(text)


def test_the_kid_is_under_the_tag() -> None:
    """Also where another key has the same secret."""
    key = RING.keys[0]
    both = KeyRing(keys=(key, msgspec.structs.replace(key, kid="other", status=KeyStatus.NEXT)))
    with expect_carrier_error(CarrierProblem.TAMPERED):
        open_carrier(make_carrier().replace(key.kid, "other"), both)


alphabet = st.sampled_from("vllm:12:.=-_Aa0+/ \n\0ä\ud800")
pieces = st.sampled_from(["vllm:", "1:", "2:", f"{KID}:", "a256gcm-zlib:", "A" * 70, "a" * 64, "="])


@given(st.text() | st.text(alphabet) | st.lists(pieces | st.text(alphabet)).map("".join))
def test_whatever_it_is_fed_it_refuses(text: str) -> None:
    with pytest.raises(CarrierError):
        open_carrier(text)


def test_many_that_are_nearly_right() -> None:
    """Flips, cuts, splices, wrong kids and wrong versions of ten genuine ones."""
    chance = random.Random(35903)
    many = ring(KeyStatus.PRIMARY, KeyStatus.NEXT, KeyStatus.VERIFY_ONLY, KeyStatus.REVOKED)
    texts = [
        *(make_carrier([{"n": n, "content": "text " * n}], RING) for n in range(5)),
        *(sign_history([n], RING) for n in range(5)),
    ]
    kids = [KID, *(key.kid for key in many.keys)]
    every = KeyRing(keys=(*RING.keys, *many.keys[1:]))

    def make_damaged_carrier() -> str:
        text = chance.choice(texts)
        for _ in range(chance.randrange(1, 4)):
            at, to = sorted(chance.randrange(len(text) + 1) for _ in range(2))
            match chance.randrange(6):
                case 0:
                    text = text[:at] + chr(chance.randrange(300)) + text[at + 1 :]
                case 1:
                    text = text[:at] + text[to:]
                case 2:
                    text = text[:at] + chance.choice(texts)[at:]
                case 3:
                    text = text.replace(KID, chance.choice(kids), 1)
                case 4:
                    text = text.replace(":2:", chance.choice([":1:", ":3:", "::", ":02:"]), 1)
                case _:
                    text = text[:to] + text[at:]
        return text

    seen: set[CarrierProblem] = set()
    for _ in range(100_000 if EVERYTHING else 20_000):
        text = make_damaged_carrier()
        if text in texts:
            continue
        try:
            open_carrier(text, every)
        except CarrierError as error:
            seen.add(error.case)
        else:
            raise AssertionError(text)
    assert seen >= {CarrierProblem.FOREIGN, CarrierProblem.MALFORMED, CarrierProblem.TAMPERED}


# -- genuine, and evil -------------------------------------------------------------------------


def content(history: str) -> bytes:
    return f'{{"iat":1,"exp":9999999999,"model":"m","owner":"o","history":{history}}}'.encode()


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"not zlib",
        zlib.compress(content("[]"))[:-1],
        zlib.compress(content("[]")) + b"more",
        zlib.compress(content("[]")) * 2,
        zlib.compress(b""),
        zlib.compress(b"\xff"),
        zlib.compress(b"[]"),
        zlib.compress(b"7"),
        zlib.compress(b"{}"),
        zlib.compress(content("{}")),
        zlib.compress(content("7")),
        zlib.compress(content("[]").replace(b"1,", b"true,", 1)),
        zlib.compress(content("[]").replace(b"1,", b"1.0,", 1)),
        zlib.compress(content("[]").replace(b'"m"', b"null")),
        zlib.compress(content("9" * 10_000)),
        zlib.compress(content("[" * 100_000 + "]" * 100_000)),
        zlib.compress(content("[" * 101 + "]" * 101)),
        zlib.compress(content('{"a":' * 500 + "1" + "}" * 500)),
    ],
)
def test_malformed_content_with_a_valid_seal_is_refused(packed: bytes) -> None:
    with expect_carrier_error(CarrierProblem.MALFORMED):
        open_carrier(encode(packed, KID))


@pytest.mark.parametrize(
    "payload", [b"", b"7", b"{}", b"\xff", b"[" * 99_999, b"[" * 200 + b"]" * 200]
)
def test_the_same_in_format_1(payload: bytes) -> None:
    with expect_carrier_error(CarrierProblem.MALFORMED):
        open_carrier(sign(payload))


def test_base64_that_is_signed_and_damaged() -> None:
    for payload in (b"A", b"AAA", b"A==="):
        text = f"vllm:1:{payload.decode()}:{hmac.digest(SECRET, payload, 'sha256').hex()}"
        with expect_carrier_error(CarrierProblem.MALFORMED):
            open_carrier(text)


def bomb(size: int) -> bytes:
    """So many spaces: a block that says a MiB again and again."""
    stream = zlib.compressobj(9)
    first, again = (
        stream.compress(b" " * (1 << 20)) + stream.flush(zlib.Z_FULL_FLUSH) for _ in range(2)
    )
    return first + again * ((size >> 20) - 1) + stream.flush()


def test_a_bomb_is_refused_with_little_work_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    text = encode(bomb(1 << 30), KID)
    assert len(text) < 2 << 20
    inflated = 0

    class Counting:
        def __init__(self) -> None:
            self.stream = zlib.decompressobj()

        def decompress(self, *given: Any) -> bytes:
            nonlocal inflated
            part = self.stream.decompress(*given)
            inflated += len(part)
            return part

    counted = SimpleNamespace(decompressobj=Counting, error=zlib.error)
    monkeypatch.setattr(carrier, "zlib", counted)
    tracemalloc.start()
    with expect_carrier_error(CarrierProblem.TOO_LARGE):
        open_carrier(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert carrier.MOST_BYTES < inflated < 2 * carrier.MOST_BYTES
    assert peak < 3 * carrier.MOST_BYTES


@pytest.mark.parametrize("head", ["vllm:1:", f"vllm:2:{KID}:a256gcm-zlib:"])
def test_giant_base64_is_refused_at_once(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = head + "A" * (256 << 20)
    # Its length is enough: nothing searches it.
    for name in ("FORMAT_1", "FORMAT_2", "base64"):
        monkeypatch.setattr(carrier, name, None)
    tracemalloc.start()
    with expect_carrier_error(CarrierProblem.TOO_LARGE):
        open_carrier(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_history_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert carrier.MOST_BYTES == 32 << 20
    # The same with less to do.
    monkeypatch.setattr(carrier, "MOST_BYTES", 1 << 20)
    chance = random.Random(1)
    image = base64.b64encode(chance.randbytes(3 << 18)).decode()
    history = [image[: (1 << 20) - 2 - len(json.dumps([""]))]]
    with expect_carrier_error(CarrierProblem.TOO_LARGE) as caught:
        make_carrier([image + image])
    assert "1 MiB" in caught.value.message
    for make in (make_carrier, sign_history):
        with expect_carrier_error(CarrierProblem.TOO_LARGE):
            make([image], RING)
    assert open_carrier(sign_history(history, RING)).history == history
    history = [image[:-200]]
    assert open_carrier(make_carrier(history)).history == history


@pytest.mark.parametrize(
    "history", [[float("nan")], [object()], [{1, 2}], [b"bytes"], [float("inf")]]
)
def test_history_that_json_cannot_represent_is_refused(history: list[Any]) -> None:
    for make in (make_carrier, sign_history):
        with expect_carrier_error(CarrierProblem.MALFORMED):
            make(history, RING)


def test_too_deeply_nested_history_is_not_sealed() -> None:
    for depth in (carrier.DEEPEST + 1, 100_000):
        deep: Any = []
        for _ in range(depth):
            deep = [deep]
        with expect_carrier_error(CarrierProblem.MALFORMED):
            make_carrier(deep)
        flat: list[Any] = [deep]
        while flat:  # one level at a time: Python's own way down would be too deep
            flat = flat.pop()
    fits: Any = 1
    for _ in range(carrier.DEEPEST - 2):  # in an array, in an object
        fits = (fits,)
    assert open_carrier(make_carrier([fits] * 3))


def test_no_message_tells_a_secret() -> None:
    texts = [make_carrier(["needle"]), sign_history(["needle"], RING)]
    for text in texts:
        for cut in range(0, len(text), 7):
            with pytest.raises(CarrierError) as caught:
                open_carrier(text[:cut])
            words = f"{caught.value!r} {caught.value.message} {caught.value.hint}"
            assert "needle" not in words
            assert SECRET.hex() not in words
            assert len(words) < 400


def test_the_wire_is_small() -> None:
    """Items are kept apart: random words of a few hundred bytes shrink little."""
    words = Path(carrier.__file__).read_text().split()
    chance = random.Random(2)
    history = [
        {"role": "user", "content": " ".join(chance.choices(words, k=80))} for _ in range(200)
    ]
    assert len(make_carrier(history)) < 0.75 * len(sign_history(history, RING))


@pytest.mark.parametrize("ttl_s", [float("nan"), float("inf"), -1.0, 1e308])
def test_a_time_to_live_that_is_none(ttl_s: float) -> None:
    with pytest.raises(VllmopsError, match="time of carriers"):
        make_carrier(ttl_s=ttl_s)
