"""What a server is told of its store and of carriers."""

from __future__ import annotations

import pytest

from vllmops.support.errors import VllmopsError
from vllmops_responses.store import backend_factory, settings
from vllmops_responses.store.backends.memory import Memory


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({settings.STORE: ""}, False),
        ({settings.STORE: "none"}, False),
        ({settings.STORE: "none", backend_factory.CLASS: "a.B"}, False),
        ({settings.STORE: "memory://"}, True),
        ({backend_factory.CLASS: "a.B"}, True),
    ],
)
def test_whether_there_is_one(environment: dict[str, str], wanted: bool) -> None:
    assert settings.is_store_configured(environment) is wanted


def test_the_limits() -> None:
    given = {settings.STORE: "memory://", settings.MAX_SIZE: "12", settings.TTL: "60.5"}
    backend = settings.make_backend_from_env(given)
    assert isinstance(backend, Memory)
    assert (backend.limits.max_size, backend.limits.ttl_s) == (12, 60.5)
    known = settings.make_backend_from_env({settings.STORE: "memory://"}).limits
    assert (known.max_size, known.max_per_key, known.owner_limit) == (10_000, None, 10_000)
    shared = settings.make_backend_from_env(
        {settings.STORE: "memory://", settings.MAX_PER_KEY: "5"}
    ).limits
    assert (shared.max_size, shared.owner_limit) == (10_000, 5)


def test_carriers() -> None:
    assert settings.parse_carrier_settings({}) == (settings.CarrierFormat.V2, 30 * 24 * 3600)
    given = {settings.CARRIER: "signed-v1", settings.CARRIER_TTL: "60"}
    assert settings.parse_carrier_settings(given) == (settings.CarrierFormat.SIGNED_V1, 60)


@pytest.mark.parametrize(
    "given", [{settings.CARRIER: "v1"}, {settings.CARRIER_TTL: "x"}, {settings.CARRIER_TTL: "0"}]
)
def test_carriers_that_can_not_be(given: dict[str, str]) -> None:
    with pytest.raises(VllmopsError) as caught:
        settings.parse_carrier_settings(given)
    assert (caught.value.code, caught.value.exit_code) == ("usage", 2)


@pytest.mark.parametrize("text", ["x", "0", "-1", "nan", "inf"])
@pytest.mark.parametrize("name", [settings.MAX_SIZE, settings.MAX_PER_KEY, settings.TTL])
def test_numbers_that_are_none(name: str, text: str) -> None:
    with pytest.raises(VllmopsError) as caught:
        settings.make_backend_from_env({settings.STORE: "memory://", name: text})
    assert caught.value.code == "usage"
    assert name in caught.value.message
