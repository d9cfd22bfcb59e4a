"""Patterns that are compiled when a text first needs them."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from vllmops.support import lazy_patterns

USERS = (
    *("collect.stacks.text_cleaning", "collect.stacks.issue_sections"),
    *("collect.stacks.stack_lines", "collect.stacks.pasted_text", "rules.stacks.tool_reports"),
    *("rules.stacks.progress_facts", "rules.stacks.hypotheses", "rules.stacks.thread_phases"),
    *("rules.stacks.prose", "rules.stacks.explanation"),
)


def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, make = [], re.compile

    def record_compile(text: str, flags: int) -> re.Pattern[str]:
        compiled.append((text, flags))
        return make(text, flags)

    monkeypatch.setattr(re, "compile", record_compile)
    known = lazy_patterns.compile_lazily("(?P<word>a+)", re.IGNORECASE)
    assert not compiled
    assert [match["word"] for text in ("Aa", "b", "a") if (match := known.fullmatch(text))] == [
        "Aa",
        "a",
    ]
    assert compiled == [("(?P<word>a+)", re.IGNORECASE)]


@pytest.mark.parametrize("name", USERS)
def test_all_lazy_patterns_compile(name: str) -> None:
    module = import_module(f"vllmops.{name}")
    known = [
        value for value in vars(module).values() if isinstance(value, lazy_patterns._LazyPattern)
    ]
    assert known
    for each in known:
        assert each.pattern
