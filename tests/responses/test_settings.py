"""What a server is told of its store."""

from __future__ import annotations

import pytest

from vllmops.errors import VllmopsError
from vllmops.responses import opening, settings
from vllmops.responses.memory import Memory


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({settings.STORE: ""}, False),
        ({settings.STORE: "none"}, False),
        ({settings.STORE: "none", opening.CLASS: "a.B"}, False),
        ({settings.STORE: "memory://"}, True),
        ({opening.CLASS: "a.B"}, True),
    ],
)
def test_whether_there_is_one(environment: dict[str, str], wanted: bool) -> None:
    assert settings.wanted(environment) is wanted


def test_the_limits() -> None:
    given = {settings.STORE: "memory://", settings.MAX_SIZE: "12", settings.TTL: "60.5"}
    backend = settings.backend(given)
    assert isinstance(backend, Memory)
    assert (backend.limits.max_size, backend.limits.ttl_s) == (12, 60.5)
    assert settings.backend({settings.STORE: "memory://"}).limits.max_size == 10_000


@pytest.mark.parametrize("text", ["x", "0", "-1", "nan", "inf"])
@pytest.mark.parametrize("name", [settings.MAX_SIZE, settings.TTL])
def test_numbers_that_are_none(name: str, text: str) -> None:
    with pytest.raises(VllmopsError) as caught:
        settings.backend({settings.STORE: "memory://", name: text})
    assert caught.value.code == "usage"
    assert name in caught.value.message
