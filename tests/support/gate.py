"""Which tests are not part of the gate, and why; and what a run says about those that failed.

The gate (``bootstrap.py test``) decides whether a change may land, so nothing but the change may
decide how it ends: no clock, no chance, no network, and nothing that only some machines have.
``bootstrap.py test --live`` runs what is listed here.
"""

from __future__ import annotations

import os
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import pytest

DOWNLOADS = "downloads packages"
TIMES = "compares times"
MEMORY = "depends on how much memory Python and its libraries take"
CHANCE = "what happens in it is drawn by chance"
FAILOVER = "databases decide by their own clocks that a server has failed"
KERNEL = "needs what only some kernels allow"

# Patterns of test ids, in which ``[`` and ``]`` are plain.
LIVE_ONLY: Final = {
    "tests/agent/patches/*[[]0.*": DOWNLOADS,
    "tests/agent/patches/test_old_code.py::test_the_patches_cost_little*": TIMES,
    "tests/agent/test_caches.py::test_a_cache_that_another_thread_spins_in_is_read_in_time": TIMES,
    "tests/agent/test_versions.py::*": DOWNLOADS,
    "tests/attach/test_inject.py::test_the_thread_is_stopped_for_less_than_a_second": TIMES,
    "tests/bundle/test_bundle_memory.py::test_ten_times_as_long_takes_about_ten_times*": TIMES,
    "tests/bundle/test_redact.py::test_it_is_quick_whatever_the_text": TIMES,
    "tests/histories/test_histories.py::*": CHANCE,
    "tests/instances/test_systemd.py::*": KERNEL,
    "tests/metrics/test_alerts.py::test_it_fires*": DOWNLOADS,
    "tests/metrics/test_alerts.py::test_none_fires_where_nothing_is_wrong": DOWNLOADS,
    "tests/metrics/test_alerts.py::test_prometheus_takes_them": DOWNLOADS,
    "tests/test_bad_input.py::test_limits[[]*memory*": MEMORY,
    "tests/test_bad_input.py::test_too_little_memory*": MEMORY,
    "tests/test_bad_input.py::test_with_little_memory_a_command_takes_little*": MEMORY,
    "tests/store/test_failover.py::*": FAILOVER,
    "tests/top/test_ssh.py::*": DOWNLOADS,
}
# Set by `bootstrap.py`: a file for what failed, which stands last in its output.
FAILURES: Final = "VLLMOPS_TEST_FAILURES"


def reason(nodeid: str) -> str:
    """Why a test is not part of the gate; empty if it is."""
    found = (why for pattern, why in LIVE_ONLY.items() if fnmatchcase(nodeid, pattern))
    return next(found, "")


class Reporter:
    """Says what failed and what was interrupted; of what passed nothing, except to a terminal."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.failed: list[str] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running.add(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.running.discard(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = str(crash.message if crash else report.longrepr).strip().partition("\n")[0]
            kind = "FAILED" if report.when == "call" else "ERROR"
            self.failed.append(f"{kind} {report.nodeid} - {why}")

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        if report.when == "call" and report.passed and not sys.stdout.isatty():
            return "passed", "", ""
        return None

    def pytest_terminal_summary(self, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.INTERRUPTED:
            self.failed += [f"ERROR {nodeid} - it was running" for nodeid in sorted(self.running)]
        if file := os.environ.get(FAILURES):
            with Path(file).open("a") as written:
                written.writelines(f"{line}\n" for line in self.failed)
