"""Several servers are judged at the same time: by threads that all read the tables first."""

from __future__ import annotations

import subprocess
import sys

from ..support.extent import long

# In a process of its own, which a crash ends; threads change places as often as they can.
CODE = """
import sys
import threading
from vllmops.rules import package_versions as packages
from vllmops.rules.stacks import thread_phases as places, signatures, wait_chains as waiting

def read():
    start.wait()
    for table in (
        signatures.load_signatures,
        places.load_frame_tables,
        waiting.load_hang_tables,
        packages.load_bad_versions,
    ):
        assert table()

sys.setswitchinterval(1e-6)
start = threading.Barrier(32)
threads = [threading.Thread(target=read) for _ in range(32)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@long
def test_tables_are_read_by_many_threads() -> None:
    for _ in range(4):
        subprocess.run([sys.executable, "-c", CODE], check=True, timeout=60)
