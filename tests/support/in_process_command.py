"""Runs a command in the test's own process: for what ends at its command line."""

from __future__ import annotations

import contextlib
import io
import sys
from unittest.mock import patch

from vllmops import app

from .commands import Answer


def run_in_process(*words: str) -> Answer:
    """Run one; what it said."""
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["vllmops", *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = app.run_command()
    return Answer(code, out.getvalue(), err.getvalue())
