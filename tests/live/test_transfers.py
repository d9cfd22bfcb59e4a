"""A request whose KV blocks nobody transfers any more ends; a slow transfer goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from ..support.extent import long
from ..support.waiting import until
from .conftest import Cli, Live, PlugIn

SLOW_S = 40.0
# Real connectors need another machine, or its network. This one loads nothing: it reports the end
# of a transfer after a while, or loses it.
CONNECTOR = """
import time
from dataclasses import dataclass
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1, KVConnectorMetadata)

def register():
    pass

@dataclass
class Loads(KVConnectorMetadata):
    seconds: dict

class LossyConnector(KVConnectorBase_V1):
    def __init__(self, *args, **fields):
        super().__init__(*args, **fields)
        self.asked, self.loading = {}, {}

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        seconds = (request.kv_transfer_params or {}).get("seconds")
        tokens = (request.num_tokens - 1) // 128 * 128 - num_computed_tokens
        return (tokens, True) if seconds and tokens > 0 else (0, False)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            self.asked[request.request_id] = request.kv_transfer_params["seconds"]

    def build_connector_meta(self, scheduler_output):
        asked, self.asked = self.asked, {}
        return Loads(asked)

    def start_load_kv(self, forward_context, **fields):
        for name, seconds in self._get_connector_metadata().seconds.items():
            if seconds > 0:
                self.loading[name] = time.monotonic() + seconds

    def get_finished(self, finished_req_ids):
        over = {name for name, at in self.loading.items() if time.monotonic() > at}
        for name in over:
            del self.loading[name]
        return None, over or None

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, *args, **fields):
        pass

    def wait_for_save(self):
        pass
"""
CONFIG = (
    '{"kv_connector": "LossyConnector", "kv_connector_module_path": "lossy", "kv_role": "kv_both"'
)


@pytest.fixture(scope="module")
def lossy(cli: Cli, plug_in: PlugIn) -> Iterator[Live]:
    path = f"{plug_in('lossy', CONNECTOR)}{os.pathsep}{cli.environment['PYTHONPATH']}"
    config = ("--kv-transfer-config", CONFIG + "}")
    server = cli.serve("lossy", "--demo", "text", "--env", f"PYTHONPATH={path}", "--", *config)
    try:
        yield server
    finally:
        cli("stop", "lossy", "--force")


def actions(server: Live, *words: str) -> Any:
    ran = server.cli("heal", "-t", server.name, "--json", *words)
    assert ran.data["problems"] == []
    return [(one["action"], one["done"]) for one in ran.data["actions"]]


@long
def test_a_lost_transfer_ends_its_request_and_a_slow_one_goes_on(lossy: Live) -> None:
    def load(seconds: float, letter: str) -> httpx.Response:
        return lossy.complete(prompt=letter * 600, kv_transfer_params={"seconds": seconds})

    with ThreadPoolExecutor(3) as pool:
        began = time.monotonic()
        slow, lost = pool.submit(load, SLOW_S, "s"), pool.submit(load, -1, "l")
        until(lambda: actions(lossy, "--dry-run") == [("transfers", False)], 30)
        assert lossy.complete(prompt="w" * 600).status_code == 200
        assert actions(lossy) == [("transfers", True)]
        assert time.monotonic() - began < SLOW_S
        assert lost.result(10).status_code == 500
        assert actions(lossy) == []
        assert not slow.done()
        assert lossy.complete(prompt="w" * 600).status_code == 200
        assert slow.result(60).status_code == 200
    assert lossy.cli("requests", "list", "-t", lossy.name, "--json").data["requests"] == []
