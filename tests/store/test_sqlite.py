"""The file of responses that are stored on SQLite."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from vllmops.errors import VllmopsError
from vllmops.store import opening
from vllmops.store.backend import Limits
from vllmops.store.sqlite import Sqlite, Worker

FILES, AT_ONCE = 100, 4


def test_a_device_is_no_file_for_a_store(tmp_path: Path) -> None:
    """SQLite would write its journal beside it, and root may do so in /dev."""
    os.mkfifo(tmp_path / "fifo")
    for place in ("/dev/null", tmp_path / "fifo", tmp_path):
        with pytest.raises(VllmopsError, match="is not a regular file"):
            opening.backend(f"sqlite:///{place}")
    opening.backend(f"sqlite:///{tmp_path}/new.db")


def test_those_that_open_a_new_file_at_once_wait_for_each_other(tmp_path: Path) -> None:
    """SQLite itself does not wait where a file changes to WAL."""

    async def opened(number: int) -> None:
        store = Sqlite(f"sqlite:///{tmp_path}/{number}.db", Limits(), "test")
        workers = [Worker(store.connect, f"worker-{one}") for one in range(AT_ONCE)]
        try:
            await asyncio.gather(
                *(
                    worker.run(lambda file: file.execute("SELECT 1").fetchone())
                    for worker in workers
                )
            )
        finally:
            for worker in workers:
                worker.stop()
                worker.thread.join()

    async def all_of_them() -> None:
        for number in range(FILES):
            await opened(number)

    asyncio.run(all_of_them())
