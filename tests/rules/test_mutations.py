"""What somebody else's dump has otherwise may make an answer more careful, never another one."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from vllmops.collect.stacks.pasted_text import parse_stacks
from vllmops.model.stacks import Frame
from vllmops.rules.stacks.explanation import Explanation, explain_stacks
from vllmops.rules.stacks.thread_phases import find_phase_ids, find_wait_ids

from .paste_forms import FORMS

HERE = Path(__file__).parent
# Dumps as py-spy prints them: the mutations change these lines.
HEAD = re.compile(r"^(?=Process \d+: |Thread \d+ )", re.MULTILINE)
LINE = re.compile(
    r"^    (?P<function>[\w.<>]+) \((?P<file>[\w/.]+\.py):(?P<line>\d+)\)$", re.MULTILINE
)
TEXTS = {
    path.stem: text
    for folder in ("field", "stacks")
    for path in sorted((HERE / folder).glob("*.txt"))
    if len(LINE.findall(text := path.read_text())) > 2 and HEAD.search(text)
}
RANKS = ("possible", "likely", "sure")
Change = Callable[[str, random.Random], str]


def rename_models(text: str, chance: random.Random) -> str:
    """Model files and kernels of other names: whatever no table knows."""
    names: dict[str, str] = {}

    def rename_frame(found: re.Match[str]) -> str:
        function, file = found["function"], found["file"]
        frame = Frame(function, file, file)
        if re.search(r"vllm/model_executor/models/|kernels?/", file) and "/" in file:
            file = f"{file.rpartition('/')[0]}/{names.setdefault(file, word(chance))}.py"
        bare = function.rpartition(".")[2]
        if "model_executor" in file and not find_phase_ids(frame) and not find_wait_ids(frame):
            bare = names.setdefault(bare, word(chance))
        return f"    {bare} ({file}:{found['line']})"

    return LINE.sub(rename_frame, text)


def word(chance: random.Random) -> str:
    return "".join(chance.choices("bdgklmnrtz", k=3)) + "_x" + str(chance.randrange(100))


def without_lines(text: str, _chance: random.Random) -> str:
    return LINE.sub(r"    \g<function> (\g<file>)", text)


def without_outer(text: str, chance: random.Random) -> str:
    """Without the frames that are the same everywhere."""
    count = chance.randrange(1, 5)
    names = (
        "<module>",
        "spawn_main",
        "_main",
        "_bootstrap",
        "run",
        "_bootstrap_inner",
        "worker_main",
    )
    gone = "|".join(map(re.escape, names[:count]))
    return re.sub(rf"^    (?:\w+\.)*(?:{gone}) \([^()]*\)\n", "", text, flags=re.MULTILINE)


def shuffle_threads(text: str, chance: random.Random) -> str:
    """The threads of each process in another order, without what stands between the processes."""
    processes = re.split(r"^(?=Process \d+: )", text, flags=re.MULTILINE)
    out = []
    for process in processes:
        head, *threads = re.split(r"^(?=Thread \d+ )", process, flags=re.MULTILINE)
        if head.startswith("Process"):
            chance.shuffle(threads)
            threads = [thread.rstrip("\n") + "\n" for thread in threads]
        out.append("".join((head, *threads)))
    return "".join(out)


def as_form(name: str) -> Change:
    return lambda text, _chance: FORMS[name](text)


CONTENT: dict[str, Change] = {
    "renamed": rename_models,
    "without line numbers": without_lines,
    "without outer frames": without_outer,
    "shuffled": shuffle_threads,
}
WRITTEN: dict[str, Change] = {
    name: as_form(name)
    for name in (
        "as py-spy prints it", "quoted", "fenced", "terminal colours", "indentation lost",
        "wrapped at 80", "docker compose", "Windows line ends", "tabs",
    )
}  # fmt: skip
SAME = CONTENT | WRITTEN


def without_inner(text: str, chance: random.Random) -> str:
    """Every stack without its innermost frames."""
    count = chance.randrange(1, 4)
    return re.sub(rf"^(Thread .*\n)(?:    .*\n){{1,{count}}}", r"\1", text, flags=re.MULTILINE)


def one_process(text: str, chance: random.Random) -> str:
    """One process of several."""
    head, *processes = re.split(r"^(?=Process \d+: )", text, flags=re.MULTILINE)
    return head + chance.choice(processes) if processes else text


LESS: dict[str, Change] = {
    "without inner frames": without_inner,
    "one process": one_process,
    "elided paths": as_form("elided paths"),
}
# They say who waits for whom, and no cause: less than any other answer.
LEAST = {"stack.worker-stuck-broadcast", "stack.lost-broadcast"}


def hangs(found: Explanation) -> list[tuple[str, int]]:
    return [(f.code, RANKS.index(f.confidence)) for f in found.findings if f.hang]


ANSWERS: dict[str, Explanation] = {}


def answer(name: str) -> Explanation:
    if name not in ANSWERS:
        ANSWERS[name] = explain_stacks(parse_stacks(TEXTS[name]))
    return ANSWERS[name]


def test_there_are_texts_of_many_kinds() -> None:
    assert len(TEXTS) > 60
    assert len({hangs(answer(name))[0][0] for name in TEXTS if hangs(answer(name))}) > 15


@settings(max_examples=1400, deadline=None, derandomize=True, database=None,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(
    name=st.sampled_from(sorted(TEXTS)),
    changes=st.lists(st.sampled_from(sorted(CONTENT)), max_size=2, unique=True),
    form=st.sampled_from(sorted(WRITTEN)),
    seed=st.integers(0, 1 << 16),
)
def test_rewriting_a_dump_does_not_change_its_diagnosis(
    name: str, changes: list[str], form: str, seed: int
) -> None:
    """The form, names and order of a dump do not change what is stuck."""
    text = TEXTS[name]
    for change in (*changes, form):
        text = SAME[change](text, random.Random(seed))
    before, after = hangs(answer(name)), hangs(explain_stacks(parse_stacks(text)))
    if before:
        assert {code for code, _ in after[:1]} <= {code for code, _ in before[:2]}
    assert max((rank for _, rank in after), default=0) <= max(
        (rank for _, rank in before), default=0
    )


@settings(max_examples=600, deadline=None, derandomize=True, database=None,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(
    name=st.sampled_from(sorted(TEXTS)),
    change=st.sampled_from(sorted(LESS)),
    seed=st.integers(0, 1 << 16),
)
def test_less_of_a_dump_makes_no_other_cause_likely(name: str, change: str, seed: int) -> None:
    """Where what decides is cut off, another cause is possible at most."""
    # The innermost frames are what tells work from a hang.
    assume(change != "without inner frames" or hangs(answer(name)))
    text = LESS[change](TEXTS[name], random.Random(seed))
    before = [code for code, _ in hangs(answer(name))]
    for code, rank in hangs(explain_stacks(parse_stacks(text))):
        assert rank == 0 or code in {*before, *LEAST}


@pytest.mark.parametrize("name", sorted((SAME | LESS).keys() - {"as py-spy prints it"}))
def test_a_mutation_changes_something(name: str) -> None:
    change = (SAME | LESS)[name]
    assert any(change(text, random.Random(1)) != text for text in TEXTS.values())
