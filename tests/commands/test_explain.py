"""``vllmops stacks explain`` as it is typed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllmops.collect.stacks.pasted_text import parse_stacks
from vllmops.model import snapshot_files
from vllmops.model.vllm_metrics import Metrics
from vllmops.rules.stacks.progress_facts import make_metrics_facts

from ..support.commands import Answer, Vllmops
from . import test_stacks

STACKS = Path(__file__).parents[1] / "rules/stacks"
SPIN = STACKS / "mm-cache-eviction-spin.txt"
BUSY = STACKS / "healthy-busy.one-dump.txt"


@pytest.fixture
def stdin_explainer(vllmops: Vllmops) -> Callable[..., Answer]:
    """``stacks explain`` with something in a pipe as its standard input."""

    def explain(content: bytes, *options: str) -> Answer:
        def fill() -> None:
            reader, writer = os.pipe()
            os.write(writer, content)
            os.close(writer)
            os.dup2(reader, 0)

        return vllmops("stacks", "explain", *options, env={"COLUMNS": "80"}, before=fill)

    return explain


def test_explain_names_the_hang_its_place_and_the_next_step(vllmops: Any) -> None:
    answer = vllmops("stacks", "explain", str(SPIN))
    assert (answer.code, answer.err) == (1, "")
    assert answer.out.startswith("The server hangs. The cause is known.\n")
    assert "where: EngineCore 4120\n" in answer.out
    assert "      LRUCache.popitem (cache.py:190)\n" in answer.out
    assert "next: vllmops cache repair" in answer.out
    assert "see: https://github.com/vllm-project/vllm/pull/43595\n" in answer.out


def test_json(vllmops: Any) -> None:
    answer = vllmops("stacks", "explain", str(SPIN), "--json")
    assert answer.code == 1
    data = json.loads(answer.out)["data"]
    assert (data["verdict"], data["samples"]) == ("hang", 1)
    (finding,) = data["findings"]
    assert finding["code"] == "stack.mm-cache-eviction-spin"
    assert (finding["severity"], finding["confidence"]) == ("error", "likely")
    assert finding["lines"]
    assert finding["sure"]


@pytest.mark.parametrize("columns", [80, 60, 40])
def test_a_narrow_terminal_tells_the_same(vllmops: Any, columns: int) -> None:
    wide, narrow = (vllmops("stacks", "explain", str(SPIN), columns=c) for c in (200, columns))
    urls = [line for line in narrow.out.splitlines() if "https:" in line]
    assert max(len(x) for x in narrow.out.splitlines() if x not in urls) <= columns
    assert "".join(narrow.out.split()) == "".join(wide.out.split())


def test_fail_on(vllmops: Any) -> None:
    compiling = str(STACKS / "jit-or-lock.txt")
    assert vllmops("stacks", "explain", compiling).code == 0
    assert vllmops("stacks", "explain", compiling, "--fail-on", "warning").code == 1
    assert vllmops("stacks", "explain", str(BUSY)).code == 0
    assert vllmops("stacks", "explain", str(BUSY), "--fail-on", "info").code == 1


def test_explain_asks_for_more_dumps_of_a_busy_server(vllmops: Any) -> None:
    answer = vllmops("stacks", "explain", str(BUSY))
    assert answer.out.startswith("The server may hang or work: these stacks fit both.")
    told = " ".join(answer.out.split())
    assert "to be sure: one dump can't tell this from work: take 3 some seconds apart" in told


def test_explain_shows_stacks_that_match_no_signature(vllmops: Any) -> None:
    answer = vllmops("stacks", "explain", str(STACKS / "healthy-loading.txt"))
    assert answer.code == 0
    assert answer.out.startswith("No known signature matches.")
    assert "Worker_TP0 4200: 2 threads\n" in answer.out
    assert "load_weights (default_loader.py:290)" in answer.out


def test_standard_input(stdin_explainer: Callable[..., Answer]) -> None:
    for options in ((), ("-",)):
        told = stdin_explainer(SPIN.read_bytes(), *options)
        assert told.code == 1
        assert "[stack.mm-cache-eviction-spin]" in told.out


def test_a_saved_snapshot(vllmops: Any, tmp_path: Path) -> None:
    saved = tmp_path / "stuck.json"
    snapshot_files.save_snapshot(saved, parse_stacks(SPIN.read_text()).samples[0])
    answer = vllmops("stacks", "explain", str(saved), "--json")
    assert json.loads(answer.out)["data"]["findings"][0]["code"] == "stack.mm-cache-eviction-spin"


def test_a_watchdog_file_tells_its_process_by_its_name(vllmops: Any, tmp_path: Path) -> None:
    dump = tmp_path / "VLLM_STACK_DUMP_for_Worker_TP3_77.log"
    dump.write_text(
        "\nCall stack dump #1 at Fri Nov 20 03:12:44 2026 due to feed timeout\n\n"
        'Current thread 0x00007f83311c46c0 (most recent call first):\n  File "x.py", line 1 in f\n'
    )
    data = json.loads(vllmops("stacks", "explain", str(dump), "--json").out)["data"]
    assert [(item["role"], item["pid"]) for item in data["seen"]] == [("worker", 77)]


def test_explain_reads_utf16_with_windows_line_ends(vllmops: Any, tmp_path: Path) -> None:
    dump = tmp_path / "dump.txt"
    dump.write_bytes(SPIN.read_text().replace("\n", "\r\n").encode("utf-16"))
    assert "[stack.mm-cache-eviction-spin]" in vllmops("stacks", "explain", str(dump)).out


def test_facts(vllmops: Any) -> None:
    def explain_with_facts(*facts: str) -> Any:
        words = [word for fact in facts for word in ("--fact", fact)]
        dump = str(STACKS / "schedule-livelock.txt")
        return json.loads(vllmops("stacks", "explain", dump, *words, "--json").out)["data"]

    codes = [item["code"] for item in explain_with_facts("running=0", "waiting=2")["findings"]]
    assert codes == ["stack.admission-deadlock"]
    assert explain_with_facts("progress=moving")["verdict"] == "working"


@pytest.mark.parametrize("fact", ["waiting", "speed=3", "waiting=many", "progress=3"])
def test_no_fact(vllmops: Any, fact: str) -> None:
    answer = vllmops("stacks", "explain", str(SPIN), "--fact", fact, "--json")
    assert (answer.code, answer.error["code"]) == (2, "usage")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "stacks.empty"),
        (b" \n\n", "stacks.empty"),
        (b"\x7fELF\x02\x01\x01" + bytes(range(256)) * 8, "stacks.binary"),
        (b"dear all,\nit hangs again (see above).\n", "stacks.not-found"),
        (b"{}", "stacks.not-found"),
        (b"[]", "stacks.not-found"),
        (b'{"kind": "caches", "schema": 1}', "stacks.not-found"),
    ],
)
def test_no_stacks(
    vllmops: Any, stdin_explainer: Callable[..., Answer], tmp_path: Path, content: bytes, code: str
) -> None:
    dump = tmp_path / "dump"
    dump.write_bytes(content)
    answer = vllmops("stacks", "explain", str(dump), "--json")
    assert (answer.code, answer.error["code"]) == (1, code)
    assert answer.error["hint"]
    told = stdin_explainer(content)
    assert told.code == 1
    assert told.err.startswith("error: ")
    assert "Traceback" not in told.err


def test_no_file(vllmops: Any, tmp_path: Path) -> None:
    answer = vllmops("stacks", "explain", str(tmp_path / "absent"), "--json")
    assert (answer.code, answer.error["code"]) == (1, "file.unreadable")
    answer = vllmops("stacks", "explain", str(tmp_path), "--json")
    assert (answer.code, answer.error["code"]) == (1, "file.unreadable")


def test_a_live_server(vllmops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose engine spins as in an eviction; real processes, with vLLM's titles and names."""
    spinning = "def popitem():\n    while True: pass\n\ndef get_and_update_features(): popitem()\n"
    source = test_stacks.TREE.replace("def spin():\n    while True: pass\n", spinning)
    source = source.replace("target=spin", "target=get_and_update_features")
    monkeypatch.setattr(test_stacks, "TREE", source)
    monkeypatch.setattr(test_stacks, "TITLES", ["VLLM::APIServer", "VLLM::EngineCore"])
    saved = tmp_path / "saved.json"
    options = ("--explain", "--interval", "0.1", "--json", "--save", str(saved))
    with test_stacks.tree(tmp_path, "spin") as server:
        told = vllmops("stacks", "dump", "-t", str(server[0]), *options)
        shown = vllmops("stacks", "dump", "-t", str(server[0]), *options[:3], "--samples", "2")
    assert told.code == shown.code == 1, told.err
    assert "watching its stacks for 0.1 s" in shown.err
    assert "watching" not in told.err
    data = told.data
    (finding,) = data["findings"]
    assert (data["samples"], data["verdict"]) == (3, "hang")
    assert (finding["code"], finding["confidence"]) == ("stack.mm-cache-eviction-spin", "sure")
    assert [item["role"] for item in data["processes"]] == ["api", "engine"]
    # What was saved says the same.
    again = vllmops("stacks", "explain", str(saved), "--json").data
    assert (again["samples"], again["findings"]) == (3, data["findings"])


def test_samples_are_for_explaining(vllmops: Any) -> None:
    answer = vllmops("stacks", "dump", "--samples", "2", "--json")
    assert (answer.code, answer.error["code"]) == (2, "usage")


@pytest.mark.parametrize(
    ("before", "after", "seconds", "facts"),
    [
        (Metrics(1, 0, 0.5, tokens=10), Metrics(1, 0, 0.5, tokens=30), 4, "running waiting moving"),
        (Metrics(1, 2, 0.5, tokens=10), Metrics(1, 2, 0.5, tokens=10), 4, "running waiting"),
        (
            Metrics(1, 2, 0.5, tokens=10),
            Metrics(1, 2, 0.5, tokens=10),
            40,
            "running waiting frozen",
        ),
        (Metrics(1, 2, 0.5, tokens=10), Metrics(1, 3, 0.5, tokens=10), 4, "running"),
        (Metrics(0, 0, 0.0, tokens=10), Metrics(0, 0, 0.0, tokens=10), 40, "running waiting"),
        (None, Metrics(), 40, ""),
    ],
)
def test_facts_from_figures(
    before: Metrics | None, after: Metrics | None, seconds: float, facts: str
) -> None:
    found = make_metrics_facts(before, after, seconds)
    if facts:
        assert found.pop("kv_usage") in {"50", "0"}
    told = [found[name] if name == "progress" else name for name in found]
    assert " ".join(told) == facts
