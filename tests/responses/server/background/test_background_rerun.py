"""What is stored of a run, so that it can run again."""

from __future__ import annotations

import json

import pytest

from vllmops.model.environment import RUN
from vllmops_responses.server.background import background_rerun
from vllmops_responses.store.backend import Response


@pytest.mark.parametrize(
    ("request_", "kept"),
    [
        pytest.param(b'{"input": "x", "min_p": 0.5}', {"min_p": 0.5}, id="all but the input"),
        pytest.param(b'{"tools": [{"headers": {"a": "b"}}]}', None, id="credentials"),
        pytest.param(b'{"chat_template_kwargs": {"n": 1e400}}', None, id="no number"),
        pytest.param(b'{"a": %b}' % (b"[" * 5000 + b"]" * 5000), None, id="too deep"),
    ],
)
def test_a_request_is_kept_if_it_can_be_stored(
    request_: bytes, kept: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN, "start")
    body = json.loads(background_rerun.embed_request(b'{"id": "resp_1"}', request_))
    assert body.get("vllmops") == (kept and {"run": "start", "request": kept})


def test_a_damaged_run_is_not_run_again() -> None:
    body = b'{"vllmops":{"run":"start","request":{}},"metadata":{"a":"\xff"}}'
    run = Response(id="r", owner="", model="m", status="failed", body=body)
    assert background_rerun.extract_request(run) == ("", {}, {})
