"""Where the state is kept, by whatever the environment says."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllmops.support.home import resolve_home

NOBODY_AT_ALL = 54321  # a user id that no database knows, as containers have them


def test_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/op")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("VLLMOPS_HOME", raising=False)
    assert resolve_home() == Path("/home/op/.local/state/vllmops")
    monkeypatch.setenv("VLLMOPS_HOME", "~/here")
    assert resolve_home() == Path("/home/op/here")


def test_the_home_of_an_unknown_user_is_refused(vllmops: Any) -> None:
    for words in (["keys", "add"], ["ps"]):
        answer = vllmops(*words, env={"VLLMOPS_HOME": "~nosuchuser/x"})
        assert answer.code == 2
        assert answer.err.startswith("error: VLLMOPS_HOME is ~nosuchuser/x, but there is no user ")


def test_a_name_that_is_not_utf8_is_refused_before_anything_is_done(
    vllmops: Any, tmp_path: Path
) -> None:
    place = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    for words in (["keys", "add", "--json"], ["keys", "list"], ["ps"], ["serve", "x"]):
        answer = vllmops(*words, env={"VLLMOPS_HOME": place})
        assert answer.code == 2
        assert "is not UTF-8" in answer.out + answer.err
    assert not Path(place).exists()


@pytest.mark.root_only
def test_without_a_home() -> None:
    user = [f"--reuid={NOBODY_AT_ALL}", f"--regid={NOBODY_AT_ALL}", "--clear-groups"]
    answer = subprocess.run(
        ["setpriv", *user, "env", "-i", sys.executable, "-m", "vllmops", "ps"],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 1
    assert "VLLMOPS_HOME" in answer.stderr
    assert "unexpected" not in answer.stderr
