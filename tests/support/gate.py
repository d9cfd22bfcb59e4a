"""Which tests are not part of the gate, and why; and what a run says about those that failed.

The gate (``bootstrap.py test``) decides whether a change may land, so nothing but the change may
decide how it ends: no clock, no chance, no network, and nothing that only some machines have.
``bootstrap.py test --live`` runs what is listed here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import pytest

DOWNLOADS = "downloads packages"
TIMES = "compares times"
MEMORY = "depends on how much memory Python and its libraries take"
CHANCE = "what happens in it is drawn by chance"
FAILOVER = "databases decide by their own clocks that a server has failed"
LIMITS = "one limit of time is for those that answer and for those that do not"
KERNEL = "needs namespaces or counters that only some kernels have"
MACHINE = "judges the machine, too, on which it runs"

# Patterns of test ids, in which ``[[]`` is the bracket before a test's parameters.
LIVE_ONLY: Final = {
    "tests/agent/patches/*[[]*0.[1-9]*.[0-9]*": DOWNLOADS,
    "tests/agent/patches/test_old_code.py::test_a_notification_that_is_lost*": DOWNLOADS,
    "tests/agent/patches/test_old_code.py::test_the_patches_cost_little*": TIMES,
    "tests/agent/state/test_caches.py::test_a_cache_*_spins_in_is_read_in_time": TIMES,
    "tests/agent/test_cost.py::test_the_cpu_time_of_its_threads": KERNEL,
    "tests/agent/state/test_memory.py::test_a_request_costs_a_microsecond_or_two_more": TIMES,
    "tests/agent/versions/test_versions.py::*": DOWNLOADS,
    "tests/actions/attach/test_injector.py::test_the_thread_is_stopped_*_a_second": TIMES,
    "tests/bundle/test_bundle_memory.py::test_memory_*": MEMORY,
    "tests/bundle/test_bundle_memory.py::test_ten_times_as_long_takes_about_ten_times*": TIMES,
    "tests/redaction/test_redactor.py::test_it_is_quick_whatever_the_text": TIMES,
    "tests/commands/test_attach.py::test_killed_halfway_it_can_be_done_again*": CHANCE,
    "tests/commands/test_bundle.py::test_whatever_hangs_it_ends_in_time": LIMITS,
    "tests/responses/commands/test_keys.py::test_rotate_waits_for_*_refuses_none": LIMITS,
    "tests/commands/test_memory.py::test_a_full_disk_does_not_fail_a_recording_that*": LIMITS,
    "tests/commands/test_nodes.py::*": KERNEL,
    "tests/commands/test_reset.py::test_reset_reports_api_servers_that_do_not_answer": LIMITS,
    "tests/commands/test_watch.py::test_a_stall_from_its_beginning_to_its_end": LIMITS,
    "tests/commands/test_watch.py::test_on_a_slow_machine_all_samples_are_there": LIMITS,
    "tests/histories/test_histories.py::*": CHANCE,
    "tests/supervision/test_node_status.py::test_a_node_*": KERNEL,
    "tests/supervision/test_node_status.py::test_peers_of_an_api_server_are_not_nodes": KERNEL,
    "tests/supervision/test_node_status.py::test_failure_cause_names_the_lost_node": KERNEL,
    "tests/supervision/test_systemd.py::*": KERNEL,
    "tests/metrics/test_alerts.py::test_it_fires*": DOWNLOADS,
    "tests/metrics/test_alerts.py::test_no_alert_fires_for_harmless_series": DOWNLOADS,
    "tests/metrics/test_alerts.py::test_prometheus_takes_them": DOWNLOADS,
    "tests/responses/store/test_bounds.py::test_elsewhere_there_are_no_more_than_may_be*": MEMORY,
    "tests/responses/store/test_bounds.py::test_events_of_many_streams_leave_memory_flat": MEMORY,
    "tests/responses/store/test_bounds.py::test_memory_stays_flat_*_are_evicted": MEMORY,
    "tests/responses/store/test_bounds.py::test_memory_per_response_is_near_its_json_size": MEMORY,
    "tests/responses/store/test_conformance.py::test_every_backend_keeps_*_about_times*": TIMES,
    "tests/responses/store/test_failover.py::*": FAILOVER,
    "tests/test_bad_input.py::test_limits[[]*memory*": MEMORY,
    "tests/test_bad_input.py::test_too_little_memory*": MEMORY,
    "tests/test_bad_input.py::test_with_little_memory_a_command_takes_little*": MEMORY,
    "tests/test_containers.py::*": KERNEL,
    "tests/test_docs.py::test_examples_that_need_no_vllm_work": MACHINE,
    "tests/test_platform.py::*": KERNEL,
    "tests/top/test_ssh.py::*": DOWNLOADS,
}
# Set by `bootstrap.py`: a file for what failed, which stands last in its output.
FAILURES: Final = "VLLMOPS_TEST_FAILURES"


def reason(nodeid: str) -> str:
    """Why a test is not part of the gate; empty if it is."""
    found = (why for pattern, why in LIVE_ONLY.items() if fnmatchcase(nodeid, pattern))
    return next(found, "")


def require_fixtures(items: Sequence[pytest.Item]) -> None:
    """Refuse tests with a fixture that is not there, also those that are not run now."""
    for item in items:
        if isinstance(item, pytest.Function):
            known = {"request", *item._fixtureinfo.name2fixturedefs}
            if unknown := set(item.fixturenames) - known:
                raise pytest.UsageError(f"{item.nodeid}: no such fixture: {', '.join(unknown)}")


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
            name = re.sub(r"@\w+$", "", report.nodeid)  # to which xdist adds the group
            self.failed.append(f"{kind} {name} - {why}")

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
