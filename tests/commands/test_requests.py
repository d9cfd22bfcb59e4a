"""Requests as a terminal shows them."""

from __future__ import annotations

import pytest

from vllmops.commands.requests.list_ import make_requests_table
from vllmops.observe.requests.listing import InFlightRequest
from vllmops.support.output import print_parts

ID = "chatcmpl-be432188b3dcdefe"
ROUTE = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("columns", "whole", "routes"), [(40, False, False), (80, True, False), (120, True, True)]
)
def test_an_id_can_be_copied_from_an_ordinary_terminal(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
    whole: bool,
    routes: bool,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    numbers = {"prompt_tokens": 131_072, "output_tokens": 4_096, "kv_blocks": 8_192}
    row = InFlightRequest(
        id="x",
        http_id=ID,
        state="running",
        age_s=7300.0,
        still_s=95.0,
        route=f"POST {ROUTE}",
        stuck="no token for 95 s",
        **numbers,  # type: ignore[arg-type]
    )
    print_parts(make_requests_table([row]))
    shown = capsys.readouterr().out
    assert (ID in shown) == whole
    assert (ROUTE in shown) == routes
    assert all(len(line) <= columns for line in shown.splitlines())
