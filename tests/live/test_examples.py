"""The examples of README and the manual that need vLLM."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from ..test_docs import LIVE, words
from .conftest import Bundled, Live


def test_examples_work(
    vision_server: Live, vision_bundle: Bundled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "demo-vision", "input": "Hello", "max_output_tokens": 2}
    response = httpx.post(f"{vision_server.url}/v1/responses", json=body, timeout=120)
    assert response.is_success, response.text
    # What the examples name, and what it is called here.
    names = {
        "demo": vision_server.name,
        "29914": str(vision_server.pids()["engine"]),
        "resp_9d1f43c8": response.json()["id"],
    }
    monkeypatch.setenv("VLLMOPS_TARGET", vision_server.name)
    monkeypatch.chdir(tmp_path)
    Path("hang.tar.gz").symlink_to(vision_bundle.path)
    for line, (code, quick) in LIVE.items():
        typed = [names.get(word, word) for word in words(line)[1:]]
        ran = vision_server.cli(*typed, *quick.split())
        assert ran.code == code, (line, ran)
