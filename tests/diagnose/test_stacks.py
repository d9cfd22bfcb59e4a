"""Every signature on its samples, in every form; and what is no hang is never called one."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllmops.client.paste import read
from vllmops.diagnose.findings import Severity
from vllmops.diagnose.signatures import catalogue
from vllmops.diagnose.stacks import Explanation, explain

from .forms import FORMS, WITHOUT_LOG, WITHOUT_NATIVE, parts

SAMPLES = sorted((Path(__file__).parent / "stacks").glob("*.txt"))
IDS = [
    "mm-cache-eviction-spin", "input-thread-dead", "schedule-livelock", "admission-deadlock",
    "kv-connector-wait", "gpu-kernel-stuck", "launch-queue-full", "worker-stuck-broadcast",
    "lost-broadcast", "broadcast-writer-blocked", "structured-output-spin", "grammar-compile",
    "tool-parser-regex", "engine-core-missing", "jit-or-lock", "startup-capture",
    "dp-collective-mismatch", "idle-spin-normal",
]  # fmt: skip


def answer(text: str) -> Explanation:
    return explain(read(text))


def told(found: Explanation) -> list[tuple[str, str]]:
    return [(each.code, each.confidence) for each in found.findings]


def name(sample: Path) -> str:
    return sample.stem


def sample(stem: str) -> str:
    return (Path(__file__).parent / "stacks" / f"{stem}.txt").read_text()


def test_the_catalogue() -> None:
    assert [each.id for each in catalogue()] == IDS
    for each in catalogue():
        assert each.cases
        assert each.references
        assert set(each.hides) <= set(IDS) - {each.id}


@pytest.mark.parametrize("signature", IDS)
def test_every_signature_has_a_sample(signature: str) -> None:
    assert any(each.stem.partition(".")[0] == signature for each in SAMPLES)


@pytest.mark.parametrize("path", SAMPLES, ids=name)
def test_what_a_sample_is(path: Path) -> None:
    found = answer(path.read_text())
    signature = path.stem.partition(".")[0]
    if signature.startswith("healthy"):
        assert found.verdict in {"unknown", "maybe", "working"}
        assert all(each.confidence == "possible" for each in found.findings)
        assert all(each.severity is Severity.INFO for each in found.findings)
        return
    assert [each.code for each in found.findings] == [f"stack.{signature}"]
    assert found.verdict == ("idle" if signature == "idle-spin-normal" else "hang")
    finding = found.findings[0]
    assert finding.confidence in {"likely", "sure"}
    assert finding.lines
    assert (finding.sure == "") == (finding.confidence == "sure")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", SAMPLES, ids=name)
def test_the_same_answer_in_every_form(path: Path, form: str) -> None:
    text = path.read_text()
    if form in WITHOUT_NATIVE and path.stem == "launch-queue-full":
        pytest.skip("what tells it is a native frame")
    if form in WITHOUT_LOG:
        text = text.removeprefix(parts(text)[0])
    assert told(answer(FORMS[form](text))) == told(answer(text))
