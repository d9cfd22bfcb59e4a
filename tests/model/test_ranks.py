"""How a person reads where a process stands."""

import pytest

from vllmops.model.ranks import (
    choose_process_title,
    format_role_and_ranks,
    make_placement,
    parse_title,
)

SIZES = {"DP": 2, "TP": 1, "PP": 4}


def test_a_dimension_of_size_one_is_left_out() -> None:
    where = make_placement("host", {"DP": 0, "TP": 0, "PP": 3}, SIZES)
    assert format_role_and_ranks("worker", where) == "worker DP0 PP3"
    assert (where.dp_rank, where.tp_rank, where.pp_rank) == (0, 0, 3)
    assert format_role_and_ranks("api", make_placement("host", {}, SIZES)) == "api"


@pytest.mark.parametrize(
    ("title", "ranks", "shown"),
    [
        ("VLLM::APIServer_1", {}, "APIServer_1"),
        ("VLLM::Worker_TP1", {"TP": 1}, "Worker_TP1"),
        ("VLLM::Worker_TP1", {}, "Worker_TP1"),  # pasted: the title is all that is known
        ("VLLM::Worker_DP0_TP1", {"DP": 0, "TP": 1}, "Worker_DP0_TP1"),
        ("VLLM::Worker", {"DP": 1}, "Worker DP1"),
        ("", {"TP": 1}, "Worker TP1"),
        ("", {}, "Worker"),
    ],
)
def test_a_title_that_lacks_ranks_is_not_shown(
    title: str, ranks: dict[str, int], shown: str
) -> None:
    assert (
        choose_process_title(title, "Worker", make_placement("", ranks, dict.fromkeys(ranks, 2)))
        == shown
    )


def test_a_title_that_anybody_may_choose_is_read() -> None:
    assert parse_title("VLLM::Worker_DP0_TP1").ranks_by_dimension() == {"DP": 0, "TP": 1}
    for number in ("9" * 5000, "9" * 20, "\N{ARABIC-INDIC DIGIT THREE}", "-1"):
        assert parse_title(f"VLLM::Worker_DP0_TP{number}").ranks_by_dimension() == {"DP": 0}
