"""A bundle of a real server."""

from __future__ import annotations

import json
import tarfile

from .conftest import Bundled, Live


def test_bundle_of_a_healthy_server_is_complete(
    vision_server: Live, vision_bundle: Bundled
) -> None:
    path = vision_bundle.path
    with tarfile.open(path) as found:
        parts = {item.name: found.extractfile(item).read() for item in found}  # type: ignore[union-attr]
    pids = vision_server.pids()
    assert {f"proc/{pid}.txt" for pid in pids.values()} <= set(parts)
    assert vision_bundle.ran.data["missing"] == []
    versions = json.loads(parts["versions.json"])
    assert versions["vllm"]
    assert versions["torch"]
    shown = parts["collect_env.txt"].decode().splitlines()
    shown = [item for item in shown if item.startswith("vLLM Version")]
    assert shown == [f"vLLM Version                 : {versions['vllm']}"]
    assert b"vllm:num_requests_running" in parts["metrics.txt"]
    assert b"Application startup complete" in parts["log.txt"]
    for words in (("doctor",), ("stacks", "explain"), ("cache", "inspect")):
        read = vision_server.cli(*words, str(path), "--json")
        assert read.code == 0, (words, read.out)
    live = vision_server.cli("cache", "inspect", "-t", vision_server.name, "--json").data
    kept = vision_server.cli("cache", "inspect", str(path), "--json").data
    assert [item["kind"] for item in kept["caches"]] == [item["kind"] for item in live["caches"]]
    assert vision_server.row["state"] == "ready"
