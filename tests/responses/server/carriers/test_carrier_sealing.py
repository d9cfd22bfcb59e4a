"""Carriers opened and sealed for a server, by its keys as they are right now."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from vllmops.model.environment import CarrierFormat
from vllmops_responses.keys import carrier
from vllmops_responses.keys.carrier import seal_history, sign_history, unseal_carrier
from vllmops_responses.keys.keyring import (
    Key,
    KeyRing,
    KeyStatus,
    Secret,
    generate_secret,
    make_single_key_ring,
)
from vllmops_responses.server.carriers import carrier_sealing
from vllmops_responses.server.carriers.carrier_merge import RequestCarrier
from vllmops_responses.server.wire_format import ApiError
from vllmops_responses.store.settings import CarrierSettings

RING = make_single_key_ring(Secret(bytes(32)))
ITEMS = [{"type": "message", "role": "user", "content": "hi"}]
WHERE: dict[str, Any] = {"model": "m", "owner": "o"}


def open_carrier(text: str, ring: KeyRing | None = RING) -> Any:
    return asyncio.run(
        carrier_sealing.open_carrier(RequestCarrier(text, 0, "input"), ring, **WHERE)
    )


def seal_carrier(
    history: Any = ITEMS, form: CarrierFormat = CarrierFormat.V2, ring: KeyRing | None = RING
) -> Any:
    return asyncio.run(
        carrier_sealing.seal_carrier(history, 1, CarrierSettings(form, 60), ring, **WHERE)
    )


@pytest.mark.parametrize("form", list(CarrierFormat))
def test_round_trip(form: CarrierFormat) -> None:
    assert open_carrier(seal_carrier(form=form)) == ITEMS
    assert (carrier.verify_carrier(seal_carrier(form=form), RING).format == 2) == (
        form is CarrierFormat.V2
    )


def test_it_is_bound_and_expires() -> None:
    found = unseal_carrier(seal_carrier(), RING, **WHERE)
    assert found.issued_at
    assert found.expires_at == found.issued_at + 60
    assert (found.model, found.owner) == ("m", "o")


def test_a_server_without_a_key_that_seals(caplog: pytest.LogCaptureFixture) -> None:
    text = seal_carrier()
    waiting = Key.from_secret(generate_secret(), KeyStatus.NEXT)
    for ring in (None, KeyRing(), KeyRing(keys=(waiting,))):
        assert not carrier_sealing.can_seal(ring)
        assert seal_carrier(ring=ring) is None
        with pytest.raises(ApiError) as caught:
            open_carrier(text, ring)
        assert (caught.value.status, caught.value.code) == (400, "carrier.unknown-key")
    assert caplog.text.count("and gets none") <= 1


@pytest.mark.parametrize("history", [[7], ["x"], [None], [[]]])
def test_a_history_that_is_no_conversation(history: Any) -> None:
    for text in (seal_history(history, RING, **WHERE), sign_history(history, RING)):
        with pytest.raises(ApiError) as caught:
            open_carrier(text)
        assert caught.value.code == "carrier.malformed"


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": "tool"},
        {"role": "assistant", "tool_calls": [{}]},
        {"role": "assistant", "tool_calls": 7},
        {"role": "assistant", "content": 7},
        {"author": 7},
        {"author": {"role": "user"}, "content": 7},
    ],
)
def test_messages_that_are_none(message: Any) -> None:
    with pytest.raises(ApiError) as caught:
        open_carrier(sign_history([message], RING))
    assert caught.value.code == "carrier.malformed"


def test_size_limit_is_checked_before_sealing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "MOST_BYTES", 100)
    with pytest.raises(ApiError, match="larger than a carrier may hold") as caught:
        asyncio.run(carrier_sealing.validate_carrier_size([{"content": "x" * 100}], 1))
    assert (caught.value.code, caught.value.param) == ("carrier.too-large", "input")


def test_large_carriers_are_processed_off_the_event_loop() -> None:
    here = threading.get_ident()
    assert asyncio.run(carrier_sealing.run_off_loop(carrier.LARGE, threading.get_ident)) == here
    assert asyncio.run(carrier_sealing.run_off_loop(carrier.LARGE + 1, threading.get_ident)) != here
