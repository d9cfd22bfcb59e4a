"""Runs several commands as forks of one interpreter: most of a command's time are its imports.

As a program it takes the command lines as JSON, and prints what each answered.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TypedDict

FORKS = Path(__file__)


class Answered(TypedDict):
    """What a command line gave."""

    words: list[str]
    code: int
    out: str
    err: str


def run_in_fork(words: list[str]) -> Answered:
    """Run one."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            command(words)
        _, status = os.waitpid(pid, 0)
        out.seek(0)
        err.seek(0)
        code = os.waitstatus_to_exitcode(status)
        return Answered(words=words, code=code, out=out.read().decode(), err=err.read().decode())


def command(words: list[str]) -> None:
    """Be the command; never returns."""
    from vllmops import app

    sys.argv = ["vllmops", *words]
    code = 70
    try:
        app.main()
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    import rich.table
    import typer.rich_utils

    from vllmops import app

    assert app, (rich.table, typer.rich_utils)
    sys.stdout.write(json.dumps([run_in_fork(words) for words in json.loads(sys.argv[1])]))
