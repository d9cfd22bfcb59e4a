"""The Python code of each version: what fits it, what does not, and what the server does then."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllmops.agent.patches import registry
from vllmops.agent.versions import features

from ...live.recording import RECORDED
from ...support.extent import EVERYTHING, combinations, long, programs
from ...support.items import ITEMS
from ...support.versions import INSTALLED, MINORS, RENAMED, Vllm, rewritten

pytestmark = programs

ENDS = MINORS[0], MINORS[-1]
DRIVE = Path(__file__).with_name("drive.py")
TABLE = Path(features.__file__).with_name("tested.json")
# `VLLMOPS_WRITE_TABLE=1 pytest tests/agent/versions/test_versions.py` writes what it finds.
NEWEST_BUILD = "0.32.0"
WRITE = os.environ.get("VLLMOPS_WRITE_TABLE") == "1"


def start(process: Vllm) -> None:
    """Make a process one that has the drive's functions, and a store."""
    process.run("import os; os.environ['VLLMOPS_RESPONSES_STORE'] = 'memory://'")
    assert process.run(DRIVE.read_text("utf-8")) is None


# That of the installed one is `test_hooks_follow_shims`.
@pytest.mark.parametrize("version", [*MINORS, INSTALLED] if EVERYTHING else ENDS)
def test_every_hook_fits(vllm: Callable[[str], Vllm], version: str) -> None:
    process = vllm(version)
    start(process)
    found: Any = process.run("out = drive_features()")
    name: Any = process.run("import vllm; out = vllm.__version__")
    if WRITE:
        table = json.loads(TABLE.read_text())
        table[name]["results"] = found
        TABLE.write_text(json.dumps(table, indent=1) + "\n")
        features.load_tested_versions.cache_clear()
    assert found == features.load_tested_versions()[name].results
    assert process.run("out = check_healing()") == "works"
    assert process.run(f"out = left_out({list(ITEMS)!r})") == [
        [{"type": "input_image", "image_url": "data:,", "detail": "auto"}],
        "no type",
        "a type",
        "parts, no type",
    ]
    recorded: Any = process.run(f"out = recorded_requests({str(RECORDED)!r})")
    assert {"ai", "agents", "codex-openai-false"} <= recorded.keys()
    assert all(ours for client in recorded.values() for _, ours in client), recorded
    assert any(stock for client in recorded.values() for stock, _ in client)
    read: Any = process.run("out = messages()")
    assert read["as it is"] > 40 < read["refused"]
    assert (read["differ"], read["quick"]) == ([], True)
    assert process.run("out = vllm_objects.problems") == []


SCRAPE = """
import importlib, os, tempfile, time
if several:
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp()
from vllmops.agent.transport import metrics_route
from vllmops.agent.hooks import vllm_objects
metrics_route.install_collector(lambda: None)
from fastapi import FastAPI
from starlette.testclient import TestClient
app = FastAPI()
importlib.import_module("vllm.entrypoints.serve.instrumentator.metrics").attach_router(app)
client = TestClient(app)
out = ""
while "vllmops:stalled" not in out:
    out = client.get("/metrics").text
    time.sleep(0.1)
out = out.count("# TYPE vllmops:stalled gauge"), vllm_objects.problems
"""


@pytest.mark.parametrize(
    ("version", "several"),
    combinations([*ENDS, INSTALLED, *(MINORS[1:-1] if EVERYTHING else ())], [False, True]),
)
def test_scraped_metrics_contain_the_servers_state(
    vllm: Callable[[str], Vllm], version: str, several: bool
) -> None:
    process = vllm(version)
    process.run(f"several = {several}")
    assert process.run(SCRAPE) == (1, [])


# Modules of what the agent hooks, where a later version could have them.
ELSEWHERE = {
    "vllm.utils.cache": "vllm.utils.caching",
    "vllm.v1.core.sched.scheduler": "vllm.v1.core.sched.steps",
    "vllm.v1.request": "vllm.v1.engine_request",
    "vllm.multimodal.cache": "vllm.multimodal.caching",
    "vllm.distributed.device_communicators.shm_broadcast": "vllm.distributed.broadcast",
}
MOVED = {
    "vllm.utils.cache": "vllm.foundation.utilities.cache",
    "vllm.entrypoints.openai.responses": "vllm.frontend.entrypoints.openai.responses",
    "vllm.entrypoints.serve.engine": "vllm.frontend.entrypoints.serve.engine",
    "vllm.multimodal.cache": "vllm.frontend.processing.multimodal.cache",
    "vllm.entrypoints.serve.utils": "vllm.frontend.entrypoints.serve.utils",
    "vllm.exceptions": "vllm.foundation.exceptions",
    "vllm.config.vllm": "vllm.foundation.config.vllm",
    "vllm.v1.core": "vllm.runtime.core",
    "vllm.v1.engine": "vllm.runtime.engine",
    "vllm.v1.executor": "vllm.runtime.executor",
    "vllm.v1.request": "vllm.runtime.request",
    "vllm.v1.worker.worker_base": "vllm.runtime.worker.worker_base",
}
LOG = """
import logging
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
handler.addFilter(lambda record: "repaired" not in record.getMessage())
logging.getLogger("vllm.vllmops").addHandler(handler)
"""


@pytest.fixture
def made_up(process: Vllm, tmp_path: Path) -> Iterator[Callable[..., Vllm]]:
    """Makes the process one of a made-up version; until the test ends."""

    def load_made_up_version(
        names: dict[str, str], moved: dict[str, str], *, shims: bool = False
    ) -> Vllm:
        place = rewritten(tmp_path, names, moved, shims=shims)
        assert process.run(str(place)) == "up"
        start(process)
        process.run(LOG)
        return process

    yield load_made_up_version
    process.send("\n")


def test_features_renamed_by_a_later_version_are_off(made_up: Callable[..., Vllm]) -> None:
    process = made_up(RENAMED, ELSEWHERE)
    found: Any = process.run("out = drive_features()")
    assert isinstance(found, dict), found
    assert {name: found[name].partition(":")[0] for name in features.FEATURES} == dict.fromkeys(
        features.FEATURES, "off"
    )
    states = {name: state for name, state in found.items() if name not in features.FEATURES}
    assert states == dict.fromkeys(registry.PATCHES, "failed")
    # One line, for the person who reads the log; the rest is in the agent's answers.
    lines: Any = process.run("out = lines")
    (line,) = lines
    assert "vLLM 0.34.0 is newer than 0.33, the newest tested; off: multimodal caches" in line
    assert "no OpenAIServingResponses" in line
    problems: Any = process.run("out = vllm_objects.problems")
    assert problems[0] in line
    assert "responses are kept in vLLM's own store" in problems[1]
    # vLLM's own routes stay, and its own store is on.
    stock = "vllm.entrypoints.openai.responses"
    routes = f"importlib.import_module('{stock}.api_router').router.routes"
    assert process.run(f"out = {{route.endpoint.__module__ for route in {routes}}}") == {
        f"{stock}.api_router"
    }
    assert process.run("from vllm import envs; out = envs.VLLM_ENABLE_RESPONSES_API_STORE") is True


@pytest.mark.parametrize(("given", "kept"), [(None, "1"), pytest.param("0", "0", marks=long)])
def test_a_class_of_another_shape_keeps_its_routes_and_its_store(
    vllm: Callable[[str], Vllm], given: str | None, kept: str
) -> None:
    process = vllm(INSTALLED)
    start(process)
    if given:  # the operator has the last word
        process.run(f"os.environ['VLLM_ENABLE_RESPONSES_API_STORE'] = {given!r}")
    process.run("cls = import_symbol('responses'); del cls.responses_full_generator")
    found: Any = process.run("out = drive_features()")
    assert [name for name, result in found.items() if result.startswith("off")] == ["responses"]
    assert process.run("out = cls.__module__, cls.__name__") == (
        "vllm.entrypoints.openai.responses.serving",
        "OpenAIServingResponses",
    )
    assert process.run("out = vars(importlib.import_module(cls.__module__))[cls.__name__] is cls")
    assert "responses_full_generator" in process.run("out = vllm_objects.problems[0]")  # type: ignore[operator]
    assert process.run("out = os.environ['VLLM_ENABLE_RESPONSES_API_STORE']") == kept


def test_hooks_follow_shims(made_up: Callable[..., Vllm]) -> None:
    process = made_up({}, MOVED, shims=True)
    found: Any = process.run("out = drive_features()")
    assert found == features.load_tested_versions()[NEWEST_BUILD].results
    assert process.run("out = vllm_objects.problems") == []
    assert process.run("out = [line for line in lines if 'has no effect' not in line]") == [
        "vllmops: vLLM 0.34.0 is newer than 0.33, the newest tested"
    ]
    module = process.run("out = module_locations.find_symbol_module('engine-core')")
    assert module == "vllm.runtime.engine.core"
