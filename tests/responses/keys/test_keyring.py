"""Rings of keys: what changes them, and what never gets lost or told."""

from __future__ import annotations

import copy
import pickle
import traceback
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmops.support.errors import ExitCode, VllmopsError
from vllmops_responses.keys import rotation
from vllmops_responses.keys.keyring import (
    LATE_S,
    Key,
    KeyRing,
    KeyStatus,
    Secret,
    generate_secret,
    make_single_key_ring,
    parse_hex_secret,
)
from vllmops_responses.keys.rotation import RotationStage

NOW = 1_800_000_000
DAY_S = 24 * 3600
NEXT, PRIMARY, VERIFY_ONLY, REVOKED = KeyStatus


def key(number: int, status: KeyStatus = NEXT, not_after: int | None = None) -> Key:
    made = Key.from_secret(Secret(number.to_bytes(32, "big")), status, NOW)
    return msgspec.structs.replace(made, not_after=not_after)


def ring(*keys: Key) -> KeyRing:
    return KeyRing(keys=keys)


def refusal(code: str) -> pytest.RaisesExc[VllmopsError]:
    return pytest.raises(VllmopsError, check=lambda error: error.code == code and bool(error.hint))


def test_a_key_is_named_after_its_secret() -> None:
    one, again = key(1), key(1, PRIMARY)
    assert (one.kid, one.fingerprint) == (again.kid, again.fingerprint)
    assert one.fingerprint.startswith(one.kid)
    assert len(one.fingerprint) == 32
    assert key(2).fingerprint != one.fingerprint
    assert (
        make_single_key_ring(generate_secret()).primary
        != make_single_key_ring(generate_secret()).primary
    )


def test_a_secret_shows_nowhere() -> None:
    secret = generate_secret()
    spelt = (secret.reveal().hex(), repr(secret.reveal()))
    held = make_single_key_ring(secret)
    try:
        raise ValueError(secret, held)
    except ValueError as error:
        shown = [*traceback.format_exception(error), repr(secret), str(secret), f"{held}"]
    assert not [text for text in shown for item in spelt if item in text]
    for encode in (msgspec.json.encode, msgspec.msgpack.encode, pickle.dumps):
        with pytest.raises(TypeError):
            encode(held)
    with pytest.raises(TypeError):
        copy.deepcopy(secret)


def test_a_rotation() -> None:
    old, new = key(1, PRIMARY), key(2)
    before = ring(old).add(new)
    assert (before.primary, before.next_key) == (old, new)
    after = before.promote(new.kid, NOW, 30 * DAY_S)
    assert after.primary == key(2, PRIMARY)
    gone = after.get(old.kid)
    assert (gone.status, gone.not_after) == (VERIFY_ONLY, NOW + 30 * DAY_S + LATE_S)
    assert after.promote(new.kid, NOW, 1) == after
    assert after.without_expired(gone.not_after or 0) == after
    assert after.without_expired((gone.not_after or 0) + 1) == ring(key(2, PRIMARY))


def test_back_to_the_key_before() -> None:
    after = ring(key(1, PRIMARY), key(2)).promote(key(2).kid, NOW, DAY_S)
    back = after.promote(key(1).kid, NOW, DAY_S)
    assert back.primary == key(1, PRIMARY)
    assert back.get(key(2).kid).status is VERIFY_ONLY


def test_a_key_that_is_there_is_not_added_again() -> None:
    held = ring(key(1, PRIMARY))
    assert held.add(key(1)) == held


def test_another_secret_with_a_known_kid_is_refused() -> None:
    held, other = ring(key(1, PRIMARY)), msgspec.structs.replace(key(2), kid=key(1).kid)
    for act in (
        held.add,
        lambda new: held.merge(ring(new)),
        lambda new: held.adopt_primary(ring(new), 0, 0),
    ):
        with refusal("keys.same-kid") as caught:
            act(other)
        assert key(1).kid in caught.value.message


def test_revoked_expired_or_unknown_key_cannot_be_promoted() -> None:
    held = ring(key(1, PRIMARY), key(2, REVOKED), key(3, VERIFY_ONLY, NOW - 1))
    for number in (2, 3):
        with refusal("keys.revoked"):
            held.promote(key(number).kid, NOW, DAY_S)
    with refusal("keys.unknown") as caught:
        held.promote("nobody", NOW, DAY_S)
    assert caught.value.exit_code == ExitCode.NOT_FOUND
    assert key(1).kid in caught.value.message


def test_only_unused_keys_are_retired_without_force() -> None:
    over, live = key(3, VERIFY_ONLY, NOW - 1), key(4, VERIFY_ONLY, NOW + 10 * DAY_S)
    endless = key(6, VERIFY_ONLY)
    held = ring(key(1, PRIMARY), key(2), over, live, key(5, REVOKED), endless)
    for number in (2, 3, 5):
        assert held.retire(key(number).kid, NOW).find(key(number).kid) is None
    for item, words in ((live, "10 days"), (endless, "for ever")):
        with refusal("keys.in-use") as caught:
            held.retire(item.kid, NOW)
        assert words in caught.value.message
        assert held.retire(item.kid, NOW, force=True).find(item.kid) is None
    with refusal("keys.primary"):
        held.retire(key(1).kid, NOW, force=True)


@pytest.mark.parametrize("with_next", [True, False])
def test_a_revoked_primary_has_a_successor_at_once(with_next: bool) -> None:
    held = ring(key(1, PRIMARY), *([key(2)] if with_next else []))
    after = held.revoke(key(1).kid, spare=key(9), now=NOW)
    assert after.get(key(1).kid).status is REVOKED
    assert after.primary == key(2 if with_next else 9, PRIMARY)
    assert after.find(key(9).kid) is None or not with_next


def test_a_next_key_whose_time_is_over_is_never_the_primary() -> None:
    over, live = key(2, not_after=NOW - 1), key(3, not_after=NOW)
    held = ring(key(1, PRIMARY), over)
    assert held.revoke(key(1).kid, spare=key(9), now=NOW).primary == key(9, PRIMARY)
    assert rotation.begin_rotation(held, key(9), NOW) == ring(key(1, PRIMARY), key(9))
    assert rotation.find_stage(held, [], NOW) is RotationStage.OVER
    # One that is live loses its end, or what it seals would be refused some day.
    after = ring(key(1, PRIMARY), over, live).revoke(key(1).kid, spare=key(9), now=NOW)
    assert after.primary == key(3, PRIMARY)


def test_revoking_another_leaves_the_primary() -> None:
    after = ring(key(1, PRIMARY), key(2, VERIFY_ONLY)).revoke(key(2).kid, spare=key(9), now=NOW)
    assert after == ring(key(1, PRIMARY), key(2, REVOKED))


@pytest.mark.parametrize(
    ("own", "theirs", "merged"),
    [
        ((), (key(1, PRIMARY),), (key(1, PRIMARY),)),
        ((key(1, PRIMARY),), (), (key(1, PRIMARY),)),
        # A rotation elsewhere arrives, at each of its steps, and out of order.
        ((key(1, PRIMARY),), (key(1, PRIMARY), key(2)), (key(1, PRIMARY), key(2))),
        (
            (key(1, PRIMARY), key(2)),
            (key(1, VERIFY_ONLY, NOW), key(2, PRIMARY)),
            (key(1, VERIFY_ONLY, NOW), key(2, PRIMARY)),
        ),
        (
            (key(1, VERIFY_ONLY, NOW), key(2, PRIMARY)),
            (key(1, PRIMARY), key(2)),
            (key(1, VERIFY_ONLY, NOW), key(2, PRIMARY)),
        ),
        (
            (key(1, VERIFY_ONLY, NOW), key(2, PRIMARY)),
            (key(1, PRIMARY), key(2, VERIFY_ONLY, NOW)),  # they went back
            (key(1, PRIMARY), key(2, VERIFY_ONLY, NOW)),
        ),
        # An old key alone, which is in use here.
        ((key(1, PRIMARY),), (key(1, VERIFY_ONLY, NOW),), (key(1, PRIMARY),)),
        ((key(1, PRIMARY),), (key(1, REVOKED),), (key(1, REVOKED),)),
        # Two rings that never met.
        ((key(1, PRIMARY),), (key(2, PRIMARY),), (key(1, PRIMARY), key(2))),
        # What one side has revoked stays so.
        (
            (key(1, REVOKED), key(2, PRIMARY)),
            (key(1, PRIMARY),),
            (key(1, REVOKED), key(2, PRIMARY)),
        ),
        ((key(1, REVOKED),), (key(1, PRIMARY),), (key(1, REVOKED),)),
        (
            (key(1, PRIMARY),),
            (key(1, REVOKED), key(2, PRIMARY)),
            (key(1, REVOKED), key(2, PRIMARY)),
        ),
    ],
)
def test_merging(own: tuple[Key, ...], theirs: tuple[Key, ...], merged: tuple[Key, ...]) -> None:
    assert ring(*own).merge(ring(*theirs)) == ring(*merged)


@pytest.mark.parametrize(
    ("own", "theirs", "led"),
    [
        ((), (key(1, PRIMARY), key(2)), (key(1, PRIMARY), key(2))),
        ((key(1, PRIMARY),), (), (key(1, PRIMARY),)),
        # A rotation elsewhere, and the way back.
        (
            (key(1, PRIMARY), key(2)),
            (key(1, VERIFY_ONLY, NOW), key(2, PRIMARY)),
            (key(1, VERIFY_ONLY, NOW), key(2, PRIMARY)),
        ),
        (
            (key(1, VERIFY_ONLY, NOW), key(2, PRIMARY)),
            (key(1, PRIMARY), key(2, VERIFY_ONLY, NOW)),
            (key(1, PRIMARY), key(2, VERIFY_ONLY, NOW)),
        ),
        # Two rings that never met.
        (
            (key(1, PRIMARY), key(3)),
            (key(2, PRIMARY),),
            (key(1, VERIFY_ONLY, NOW + DAY_S + LATE_S), key(3), key(2, PRIMARY)),
        ),
        # What was revoked, or is over, seals no more.
        (
            (key(1, REVOKED), key(2, PRIMARY)),
            (key(1, PRIMARY),),
            (key(1, REVOKED), key(2, PRIMARY)),
        ),
        ((key(1, VERIFY_ONLY, NOW - 1), key(2, PRIMARY)), (key(1, PRIMARY),), (key(2, PRIMARY),)),
        (
            (key(1, PRIMARY),),
            (key(1, REVOKED), key(2, PRIMARY)),
            (key(1, REVOKED), key(2, PRIMARY)),
        ),
    ],
)
def test_leading(own: tuple[Key, ...], theirs: tuple[Key, ...], led: tuple[Key, ...]) -> None:
    assert ring(*own).adopt_primary(ring(*theirs), NOW, DAY_S) == ring(*led)


numbers = st.integers(1, 5)
steps = st.one_of(
    st.tuples(st.just("add"), numbers),
    st.tuples(st.just("promote"), numbers),
    st.tuples(st.just("over"), numbers),
    st.tuples(st.just("revoke"), numbers),
    st.tuples(st.just("retire"), numbers),
    st.tuples(st.just("merge"), numbers),
    st.tuples(st.just("led"), numbers),
)


def apply_step(held: KeyRing, step: str, number: int) -> KeyRing:
    kid = key(number).kid
    match step:
        case "add":
            return held.add(key(number))
        case "promote":
            return held.promote(kid, NOW, DAY_S)
        case "over":
            return held.without_expired(NOW)
        case "revoke":
            return held.revoke(kid, spare=key(9), now=NOW)
        case "retire":
            return held.retire(kid, NOW)
        case "led":
            return held.adopt_primary(ring(key(number, PRIMARY), key(number + 10)), NOW, DAY_S)
        case _:
            return held.merge(ring(key(number, PRIMARY), key(number + 10)))


@given(st.lists(steps, max_size=12))
def test_only_revoke_and_retire_remove_usable_keys(walk: list[tuple[str, int]]) -> None:
    held = ring(key(0, PRIMARY))
    for step, number in walk:
        try:
            after = apply_step(held, step, number)
        except VllmopsError:
            continue
        opens = {item.kid for item in held.keys if item.status is not REVOKED}
        lost = opens - {item.kid for item in after.keys if item.status is not REVOKED}
        assert lost <= ({key(number).kid} if step in {"revoke", "retire"} else set())
        assert len(after.select_keys(PRIMARY)) == 1 or step == "merge"
        assert len(after.select_keys(PRIMARY)) <= 1
        held = after


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "keys.too-short"),
        ("aa", "keys.too-short"),
        ("ab" * 31, "keys.too-short"),
        ("ab" * 31 + "a", "keys.not-hex"),
        ("xy" * 32, "keys.not-hex"),
        ("ä" * 64, "keys.not-hex"),
        ("0x" + "ab" * 32, "keys.not-hex"),
    ],
)
def test_malformed_hex_secret_is_rejected(text: str, code: str) -> None:
    with refusal(code) as caught:
        parse_hex_secret(text, "the text")
    assert caught.value.message.startswith("the text is")
    shown = "".join(traceback.format_exception(caught.value))
    assert len(text) < 20 or text not in shown


def test_keys_as_people_write_them() -> None:
    assert parse_hex_secret(" " + "AB" * 32 + "\n", "it").reveal() == b"\xab" * 32
    assert len(parse_hex_secret("ab" * 48, "it").reveal()) == 48


def test_inconsistent_keys_and_keyrings_are_rejected() -> None:
    for keys in ((key(1), key(1)), (key(1, PRIMARY), key(2, PRIMARY))):
        with pytest.raises(ValueError, match="two keys"):
            ring(*keys)
    for change in ({"kid": "a b"}, {"kid": ""}, {"fingerprint": "0" * 32}):
        with pytest.raises(ValueError, match=r"kid|fingerprint"):
            msgspec.structs.replace(key(1), **change)
    with pytest.raises(ValueError, match="shorter"):
        Key.from_secret(Secret(b"short"), NEXT)


@pytest.mark.parametrize("overlap_s", [float("nan"), float("inf"), -1.0, 1e308])
def test_an_overlap_that_is_no_time(overlap_s: float) -> None:
    held = ring(key(1, PRIMARY), key(2))
    for change in (
        partial(held.promote, key(2).kid, NOW, overlap_s),
        partial(held.adopt_primary, ring(key(2, PRIMARY)), NOW, overlap_s),
    ):
        with pytest.raises(VllmopsError, match="overlap") as caught:
            change()
        assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("at", [-1, 10**12, 10**300])
def test_a_key_of_no_time(at: int) -> None:
    for field in ("created_at", "not_after"):
        with pytest.raises(ValueError, match="outside 1970 to 9999"):
            Key(**{**msgspec.structs.asdict(key(1)), field: at})
