"""How a person reads where a process stands."""

import pytest

from vllmops.protocol.place import headed, named, of_title, place

SIZES = {"DP": 2, "TP": 1, "PP": 4}


def test_a_dimension_of_size_one_is_left_out() -> None:
    where = place("host", {"DP": 0, "TP": 0, "PP": 3}, SIZES)
    assert named("worker", where) == "worker DP0 PP3"
    assert (where.dp_rank, where.tp_rank, where.pp_rank) == (0, 0, 3)
    assert named("api", place("host", {}, SIZES)) == "api"


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
    assert headed(title, "Worker", place("", ranks, dict.fromkeys(ranks, 2))) == shown


def test_a_title_that_anybody_may_choose_is_read() -> None:
    assert of_title("VLLM::Worker_DP0_TP1").numbers() == {"DP": 0, "TP": 1}
    for number in ("9" * 5000, "9" * 20, "\N{ARABIC-INDIC DIGIT THREE}", "-1"):
        assert of_title(f"VLLM::Worker_DP0_TP{number}").numbers() == {"DP": 0}
