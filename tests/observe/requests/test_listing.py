"""Requests as the command line puts them together, from what each process says."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest

from vllmops.model.caches import ProcessGap
from vllmops.model.requests import EngineRequest, FrontRequest, ProcessRequests, RequestState
from vllmops.observe.requests.listing import merge_requests, select_by_id
from vllmops.rules.requests import check_zombie_requests, compare_request_sides

API, ENGINE, WORKER = 11, 12, 13


def api(*names: str) -> ProcessRequests:
    front = [FrontRequest(id=name, http_id=name[:-9], age_s=1.0, owner="o") for name in names]
    return ProcessRequests(pid=API, role="api", front=front)


def engine(
    *names: str, state: str = RequestState.RUNNING, **fields: float | bool
) -> ProcessRequests:
    held = [EngineRequest(id=name, state=state, kv_blocks=3) for name in names]
    return ProcessRequests(pid=ENGINE, role="engine", engine=held, **fields)  # type: ignore[arg-type]


def worker(*names: str) -> ProcessRequests:
    return ProcessRequests(pid=WORKER, role="worker", worker=list(names))


ONE, OTHER = "cmpl-job1-0-1234abcd", "chatcmpl-job12-99999999"


def test_a_request_that_all_know_is_one_row_and_no_finding() -> None:
    processes = [api(ONE), engine(ONE), worker(ONE)]
    (row,) = merge_requests(processes, 30, {})
    assert (row.id, row.http_id, row.state, row.kv_blocks) == (ONE, ONE[:-9], "running", 3)
    assert (row.owner, row.api, row.engine, row.stuck) == ("o", API, ENGINE, "")
    assert compare_request_sides(processes, []) == {}


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        ([api(), engine(ONE), worker(ONE)], "engine 12 has it (running; 3 KV blocks"),
        ([api(ONE), engine(), worker()], "api 11 waits for it, no engine has it"),
        ([api(), engine(), worker(ONE)], "worker 13 has it, no scheduler does"),
    ],
)
def test_a_request_that_one_side_alone_knows(processes: list[ProcessRequests], words: str) -> None:
    assert words in compare_request_sides(processes, [])[ONE]
    (finding,) = check_zombie_requests([compare_request_sides(processes, [])] * 3)
    assert (finding.code, finding.subject) == ("request.zombie", ONE)


def test_a_request_on_its_way_is_none() -> None:
    for looks in product([{}, {ONE: "engine 12 has it"}], repeat=3):
        assert bool(check_zombie_requests(looks)) == all(looks)


def test_incomplete_side_is_not_compared() -> None:
    silent = ProcessGap(role="api", pid=10, code="agent.timeout", reason="", hint="", exit_code=3)
    assert compare_request_sides([api(), engine(ONE)], [silent]) == {}
    assert compare_request_sides([engine(ONE), worker(ONE)], []) == {}
    blind = ProcessRequests(pid=API + 1, role="api")  # its agent has found no engine client
    assert compare_request_sides([api(), blind, engine(ONE)], []) == {}
    unread = ProcessRequests(pid=ENGINE, role="engine", engine=[], problems=("x",))
    assert compare_request_sides([api(ONE), unread, worker(ONE)], []) == {}


def test_finished_request_is_not_reported_as_a_difference() -> None:
    leaving = ProcessRequests(pid=ENGINE, role="engine", engine=[], leaving=(ONE,))
    assert compare_request_sides([api(), leaving, worker(ONE)], []) == {}
    assert (
        compare_request_sides([api(), engine(ONE, state=RequestState.FINISHED), worker()], []) == {}
    )


def test_a_request_that_waits_while_others_get_tokens_is_not_stuck() -> None:
    def stuck(engine: ProcessRequests) -> bool:
        return bool(merge_requests([api(ONE), engine], 30, {})[0].stuck)

    waiting = RequestState.WAITING
    assert not stuck(engine(ONE, state=waiting, still_s=0.0))
    assert stuck(engine(ONE, state=waiting, still_s=31.0))
    assert not stuck(engine(ONE, state=waiting, still_s=31.0, resting=True))


def test_engines_of_two_nodes_may_have_one_pid() -> None:
    processes = [
        api(ONE, OTHER),
        msgspec.structs.replace(engine(ONE, still_s=31.0), node="one"),
        msgspec.structs.replace(engine(OTHER, still_s=0.0), node="two"),
    ]
    rows = {row.id: (row.node, bool(row.stuck)) for row in merge_requests(processes, 30, {})}
    assert rows == {ONE: ("one", True), OTHER: ("two", False)}


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("job1", [ONE]),
        ("cmpl-job1-0", [ONE]),
        (ONE, [ONE]),
        ("job12", [OTHER]),
        ("chatcmpl-job12", [OTHER]),
        ("job", []),
        ("", []),
        (".*", []),
    ],
)
def test_the_ids_that_mean_a_request(word: str, found: list[str]) -> None:
    rows = merge_requests([api(ONE, OTHER), engine(ONE, OTHER)], 30, {})
    assert [row.id for row in select_by_id(rows, word)] == found


def test_no_id_means_no_request_not_those_that_no_api_server_knows() -> None:
    """An empty variable of a shell, `abort "$ID"`, would end all that a blocked server has."""
    rows = merge_requests([engine(ONE, OTHER)], 30, {})
    assert [row.http_id for row in rows] == ["", ""]
    assert select_by_id(rows, "") == []


@pytest.mark.parametrize(
    ("names", "word", "found"),
    [
        # Two clients' own ids.
        (("chatcmpl-job-1", "chatcmpl-job-1-2"), "job-1", ["chatcmpl-job-1"]),
        (("chatcmpl-job-1-2",), "job-1", []),
        (("cmpl-job-1-0", "cmpl-job-1-2-0"), "job-1", ["cmpl-job-1-0"]),
        # The third prompt of one, and the only one of the other.
        (("cmpl-job-1-2", "cmpl-job-1-2-0"), "job-1-2", ["cmpl-job-1-2-0"]),
        (("embd-job-0", "embd-job-1"), "job", ["embd-job-0", "embd-job-1"]),
        (("cmpl-job-0", "cmpl-job-1"), "cmpl-job", ["cmpl-job-0", "cmpl-job-1"]),
        (("generative-scoring-job-0",), "generative-scoring-job", ["generative-scoring-job-0"]),
        (("chatcmpl-job", "cmpl-job-0"), "job", ["chatcmpl-job", "cmpl-job-0"]),
    ],
)
def test_only_some_routes_append_a_prompt_number_to_an_id(
    names: tuple[str, ...], word: str, found: list[str]
) -> None:
    rows = merge_requests([api(*(f"{name}-1234abcd" for name in names))], 30, {})
    assert [row.http_id for row in select_by_id(rows, word)] == found
