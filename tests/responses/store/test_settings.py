"""What a server is told of its store and of carriers."""

from __future__ import annotations

from typing import Any

import pytest

from vllmops.model.environment import (
    CARRIER,
    CARRIER_TTL,
    CHECKED,
    MAX_PER_KEY,
    MAX_SIZE,
    STORE,
    STORE_CLASS,
    TTL,
    CarrierFormat,
)
from vllmops.support.errors import VllmopsError
from vllmops_responses.store import settings
from vllmops_responses.store.backends.memory import Memory


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({STORE: ""}, False),
        ({STORE: "none"}, False),
        ({STORE: "none", STORE_CLASS: "a.B"}, False),
        ({STORE: "memory://"}, True),
        ({STORE_CLASS: "a.B"}, True),
    ],
)
def test_whether_there_is_one(environment: dict[str, str], wanted: bool) -> None:
    assert settings.is_store_configured(environment) is wanted


class Environment(dict[str, str]):
    """One that is empty, and remembers what was asked for."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def get(self, name: str, *default: Any) -> Any:
        self.names.add(name)
        return super().get(name, *default)


def test_dry_run_checks_all_that_is_read() -> None:
    """`serve` loads the settings only where one of these names is set."""
    environment = Environment()
    settings.validate_settings(environment)
    assert environment.names == CHECKED


def test_the_limits() -> None:
    given = {STORE: "memory://", MAX_SIZE: "12", TTL: "60.5"}
    backend = settings.make_backend_from_env(given)
    assert isinstance(backend, Memory)
    assert (backend.limits.max_size, backend.limits.ttl_s) == (12, 60.5)
    known = settings.make_backend_from_env({STORE: "memory://"}).limits
    assert (known.max_size, known.max_per_key, known.owner_limit) == (10_000, None, 10_000)
    shared = settings.make_backend_from_env({STORE: "memory://", MAX_PER_KEY: "5"}).limits
    assert (shared.max_size, shared.owner_limit) == (10_000, 5)


def test_carriers() -> None:
    assert settings.parse_carrier_settings({}) == (CarrierFormat.V2, 30 * 24 * 3600)
    given = {CARRIER: "signed-v1", CARRIER_TTL: "60"}
    assert settings.parse_carrier_settings(given) == (CarrierFormat.SIGNED_V1, 60)


@pytest.mark.parametrize("given", [{CARRIER: "v1"}, {CARRIER_TTL: "x"}, {CARRIER_TTL: "0"}])
def test_carriers_that_can_not_be(given: dict[str, str]) -> None:
    with pytest.raises(VllmopsError) as caught:
        settings.parse_carrier_settings(given)
    assert (caught.value.code, caught.value.exit_code) == ("usage", 2)


@pytest.mark.parametrize("text", ["x", "0", "-1", "nan", "inf"])
@pytest.mark.parametrize("name", [MAX_SIZE, MAX_PER_KEY, TTL])
def test_numbers_that_are_none(name: str, text: str) -> None:
    with pytest.raises(VllmopsError) as caught:
        settings.make_backend_from_env({STORE: "memory://", name: text})
    assert caught.value.code == "usage"
    assert name in caught.value.message
