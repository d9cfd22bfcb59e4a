"""``vllmops patches`` and ``serve --no-patch``, without vLLM."""

from typing import Any

import pytest

from vllmops.agent.patches.registry import PATCHES
from vllmops.agent.versions import features


@pytest.mark.parametrize("patch", PATCHES)
def test_show(vllmops: Any, patch: str) -> None:
    answer = vllmops("patches", "show", patch, columns=60)
    assert answer.code == 0
    assert max(map(len, answer.out.splitlines())) <= 60
    assert patch in answer.out
    data = vllmops("patches", "show", patch, "--json").data
    assert data["upstream"] == PATCHES[patch].upstream
    assert data["modules"] == list(PATCHES[patch].modules)


@pytest.mark.parametrize(
    "words", [("patches", "show", "x"), ("serve", "--demo", "text", "--no-patch", "x")]
)
def test_unknown(vllmops: Any, words: tuple[str, ...]) -> None:
    answer = vllmops(*words, "--json")
    assert (answer.code, answer.error["code"]) == (2, "patch.unknown")
    assert "mm-lru-ghost-keys" in answer.error["message"]


def test_versions(vllmops: Any) -> None:
    answer = vllmops("patches", "list", "--versions", columns=80)
    assert answer.code == 0
    heading, _, *rows = answer.out.splitlines()
    versions = [version.rpartition(".")[0] for version in features.load_tested_versions()]
    assert heading.split() == versions
    assert {"0.24", "0.28", "0.33"} <= set(versions)
    cells = {" ".join(row.split()[:-10]): row.split()[-10:] for row in rows}
    assert set(cells["stored responses, carriers"]) == {"yes"}
    assert set(cells["mm-lru-stale-eviction"]) == {"yes"}
    assert set(cells["mm-lru-ghost-keys"]) == {"-"}
    data = vllmops("patches", "list", "--versions", "--json").data
    assert [row["id"] for row in data["features"]] == [*features.FEATURES, *PATCHES]
    assert data["features"][0]["versions"]["0.24.0"] == "works"
    assert data["live"]["0.28.0"] is True


def test_versions_are_not_those_of_a_server(vllmops: Any) -> None:
    answer = vllmops("patches", "list", "--versions", "-t", "demo", "--json")
    assert (answer.code, answer.error["code"]) == (2, "usage")


def test_no_patch_reaches_the_server(vllmops: Any) -> None:
    words = ("--no-patch", "mm-lru-ghost-keys", "--no-patch", "request-hash-cycle")
    answer = vllmops("serve", "org/model", *words, "--dry-run")
    assert answer.code == 0
    assert "VLLMOPS_NO_PATCH=mm-lru-ghost-keys,request-hash-cycle" in answer.out


def test_a_server_without_agents(lab: Any) -> None:
    lab.serve("a")
    for words in (("patches", "list"), ("patches", "verify"), ("cache", "repair"), ("heal",)):
        answer = lab.vllmops(*words, "-t", "a", "--json")
        assert answer.code == 5
        assert answer.error["code"] in {"patches.no-agent", "repair.no-agent", "heal.no-agent"}
        assert answer.error["hint"]
