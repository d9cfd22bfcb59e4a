"""Every state that ``vllmops heal`` heals, at random, under load of every kind.

``python -m tests.live.healing --minutes 240 --each 50 --seed 1`` ends when the time is over or when
each state was healed so often. The same seed injects the same states in the same order.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil

from vllmops.demo.inputs import make_chat_request

from . import hangs
from .conftest import Cli
from .hangs import (
    BACKTRACKING,
    LOSING,
    OLD_CACHE,
    TOOL,
    UNPATCHED,
    Asked,
    Prone,
)
from .soak import Soak, make_text_request

HEALED_S = 30.0  # from a stall to its end
PATIENCE_S = 90.0  # until it counts as not healed
PAUSE_S = 4.0  # before it is resumed
TOLD_S = 8.0  # from then to the line in the log
LATE_S = 60.0  # until what a state left, as a ghost key that nothing met, is found
APART_S = (1.0, 6.0)  # healthy load between two states
SAMPLE_S = 10.0
WARM_UP = 0.2  # of the run: memory grows until caches are full
FLAT = 1.1


@dataclass(frozen=True)
class Lost:
    """A request of the load that did not end as it should.

    Args:
        began, ended: in monotonic seconds.
        at: wall clock of its end, as the server's log has it.
        what: kind of the request, and the error.
    """

    began: float
    ended: float
    at: str
    what: str


class Load(Soak):
    """Clients whose requests fit into the caches of a server that is prone to hang."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lost = list[Lost]()
        self.client.timeout = httpx.Timeout(PATIENCE_S)
        self.open, self.busy, self.lock = threading.Event(), 0, threading.Lock()
        self.open.set()
        self.kinds = tuple(kind for kind in self.kinds if kind != self.carried_conversation)

    def send_request(self, kind: Callable[[int], None]) -> None:
        self.open.wait()
        with self.lock:
            self.busy += 1
        try:
            super().send_request(kind)
        finally:
            with self.lock:
                self.busy -= 1

    def lose(self, what: str, began: float) -> None:
        self.lost.append(Lost(began, time.monotonic(), time.strftime("%H:%M:%S"), what))

    def images(self, number: int) -> None:
        self.post("/v1/chat/completions", make_chat_request([number], max_tokens=5))

    def same_images(self, number: int) -> None:
        self.post("/v1/chat/completions", make_chat_request([number % 3], max_tokens=5))

    def long_prompt(self, number: int) -> None:
        self.request_chat_completion(f"{number} " + "z" * 500)

    # An abort may come late, because a state blocks the event loop or what reads it. Meanwhile the
    # engine gets on with these, so nothing has stalled: they are over after some seconds.
    def aborted_request(self, number: int) -> None:
        asked = Asked(self.url, {**make_text_request(f"Stop {number}.", 300), "ignore_eos": True})
        time.sleep(0.2)
        asked.abort()

    def aborted_stream(self, number: int) -> None:
        next(self.lines(number, 300))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self.client.post(path, json=body)
        if answer.is_error:
            raise ValueError(f"{answer.status_code}: {answer.text}")
        return answer.json()

    @contextmanager
    def pause_requests(self) -> Iterator[None]:
        """No request is in flight during the block."""
        self.open.clear()
        try:
            while self.busy:
                time.sleep(0.05)
            yield
        finally:
            self.open.set()


@dataclass(frozen=True)
class Victims:
    """The requests of a state.

    Args:
        kept: those that get their answer once it is healed.
        ended: those that end with it, with an error.
        over: whether all else about it is over.
    """

    kept: tuple[Asked, ...] = ()
    ended: tuple[Asked, ...] = ()
    over: Callable[[], bool] = lambda: True

    def has_all_answers(self) -> bool:
        asked = (*self.kept, *self.ended)
        return all(one.aborted or one.answer(0.05) is not None for one in asked) and self.over()

    @property
    def failure_messages(self) -> list[str]:
        return [f"a request of it: {one.status}" for one in self.kept if one.status != 200]


@dataclass(frozen=True)
class State:
    """A state that is injected.

    Args:
        name: in the summary.
        made: puts the server into it; ends it where it was not healed.
        actions: what may be done about it.
        asks: whether it is healed by ``heal --resume`` alone.
    """

    name: str
    made: Callable[[Prone, Load], AbstractContextManager[Victims]]
    actions: frozenset[str]
    asks: bool = False


_numbers = count(1)


@contextmanager
def ghosts(server: Prone, load: Load) -> Iterator[Victims]:
    assert hangs.leave_ghost(server.url)
    # What is new to the cache evicts.
    yield Victims(tuple(server.send_chat_request(50_000 + next(_numbers)) for _ in range(8)))


@contextmanager
def larger_than_the_cache(server: Prone, load: Load) -> Iterator[Victims]:
    first = server.send_chat_request(text="z" * 1500)
    time.sleep(0.3)
    yield Victims((server.send_chat_request(),), (first,))


@contextmanager
def knot(server: Prone, load: Load) -> Iterator[Victims]:
    """As `hangs.livelock`, with requests of others about."""
    seeds = [60_000 + next(_numbers) for _ in range(3)]
    with server.suspend_process("worker"):
        first = server.send_chat_request()
        time.sleep(0.3)
        bodies = [make_chat_request(seeds, letter * 750) for letter in "zq"]
        for body in bodies:
            body["messages"][0]["content"].reverse()
        asked = [Asked(server.url, body) for body in bodies]
        time.sleep(0.5)
    yield Victims((first, *asked))


@contextmanager
def input_thread(server: Prone, load: Load) -> Iterator[Victims]:
    with hangs.input_thread_dead(server) as (lost, behind):
        yield Victims((behind,), (lost,))
    # The reader's end may have left ghost keys, which would show at any later time.
    server.cli("heal", "-t", server.name, "--only", "caches", "--json")


@contextmanager
def output_thread(server: Prone, load: Load) -> Iterator[Victims]:
    lost = server.unencodable()
    yield Victims((server.send_chat_request(),), (lost,))


@contextmanager
def lost_notify(server: Prone, load: Load) -> Iterator[Victims]:
    with load.pause_requests():
        asked = hangs.lost_notify(server)
    yield Victims((asked,))


@contextmanager
def lost_abort(server: Prone, load: Load) -> Iterator[Victims]:
    """The engine goes on with requests that nobody waits for, one after the other."""
    path, before = server.place / "lost-abort", ids(server)
    with load.pause_requests():
        path.touch()
        asked = [server.send_chat_request(max_tokens=1100, ignore_eos=True) for _ in range(3)]
        time.sleep(0.3)
        for one in asked:
            one.abort()
        time.sleep(0.3)
        path.unlink()
        lost = ids(server) - before
    yield Victims(over=lambda: not lost & ids(server))


@contextmanager
def lost_request(server: Prone, load: Load) -> Iterator[Victims]:
    """A client waits for a request that the engine does not have."""
    path = server.place / "lost-request"
    with load.pause_requests():
        path.touch()
        asked = server.send_chat_request()
        while path.exists():
            time.sleep(0.01)
    yield Victims(ended=(asked,))


@contextmanager
def lost_load(server: Prone, load: Load) -> Iterator[Victims]:
    """A request waits for KV blocks, and nobody will report that they are there."""
    text = f"{next(_numbers)} ".ljust(300, "z")
    yield Victims((server.send_chat_request(text=text, kv_transfer_params={"load": "lost"}),))


@contextmanager
def inject_pause(server: Prone, load: Load) -> Iterator[Victims]:
    httpx.post(f"{server.url}/pause", params={"mode": "keep"}, timeout=30).raise_for_status()
    yield Victims((server.send_chat_request(),))


@contextmanager
def inject_stopped_process(server: Prone, load: Load) -> Iterator[Victims]:
    role = random.choice(("worker", "engine", "api"))
    with server.suspend_process(role):
        yield Victims((server.send_chat_request(),))


@contextmanager
def inject_backtracking(server: Prone, load: Load) -> Iterator[Victims]:
    forced = {"choice": [BACKTRACKING]}
    asked = server.send_chat_request(tools=[TOOL], structured_outputs=forced, max_tokens=500)
    with suppress(httpx.HTTPError):
        while httpx.get(f"{server.url}/health", timeout=1):
            time.sleep(0.05)
    yield Victims((server.send_chat_request(),), (asked,))


def state(
    name: str,
    made: Callable[[Prone, Load], AbstractContextManager[Victims]],
    *actions: str,
    **fields: Any,
) -> State:
    return State(name, made, frozenset(actions or {name}), **fields)


STATES = (
    state("caches", ghosts),
    state("admission", larger_than_the_cache),
    state("encoder-cache", knot),
    state("input thread", input_thread, "io-threads", "caches"),
    state("output thread", output_thread, "io-threads"),
    state("broadcast", lost_notify),
    state("zombie of the engine", lost_abort, "zombies"),
    state("zombie of the API server", lost_request, "zombies"),
    state("transfers", lost_load),
    state("paused", inject_pause, asks=True),
    state("stopped", inject_stopped_process, asks=True),
    state("event-loop", inject_backtracking),
)


def ids(server: Prone) -> set[str]:
    """The requests that the server knows."""
    ran = server.cli("requests", "list", "-t", server.name, "--json")
    return {row["id"] for row in ran.data["requests"]}


@dataclass
class Injected:
    """What became of an injection.

    Args:
        state: its name.
        at_s: when it was begun, in seconds since the run began.
        over_s: when it was over, likewise; None until then.
        took: whether the server got into it, and did not get out of it by itself.
        healed_s: from then to its end; None if it did not end by itself.
        actions: what was done about it, as the server's log has it.
        wrong: what should not have been.
    """

    state: str
    at_s: float
    over_s: float | None = None
    took: bool = True
    healed_s: float | None = None
    actions: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass
class Tail:
    """The lines of the server's log that tell of an action, each once."""

    path: Path
    at: int = 0

    def read_new_actions(self) -> list[str]:
        with self.path.open("rb") as file:
            file.seek(self.at)
            lines = file.read().rpartition(b"\n")[0]
        self.at += len(lines) + bool(lines)
        words = lines.decode(errors="replace").splitlines()
        return [line.partition("vllmops: heal: ")[2] for line in words if "vllmops: heal: " in line]


class Run:
    """A run of the soak.

    Args:
        server: that hangs and is healed.
        load: of other clients.
        seed: of the order of the states.
        each: how often each state is to be healed.
        minutes: when to end at the latest.
        only: names of states; all where empty.
        kept: where the results are written after each injection.
    """

    def __init__(
        self, server: Prone, load: Load, *, seed: int, each: int, minutes: float,
        only: tuple[str, ...], kept: Path,
    ) -> None:  # fmt: skip
        self.server, self.load, self.each, self.kept = server, load, each, kept
        self.choice, self.seed = random.Random(seed), seed
        self.began, self.ends = time.monotonic(), time.monotonic() + 60 * minutes
        self.states = [one for one in STATES if not only or one.name in only]
        self.injections: list[Injected] = []
        self.unasked: list[str] = []
        self.memory: list[dict[str, int]] = []
        self.tail = Tail(server.launched.log)

    def run(self) -> None:
        """Inject until the end."""
        over = threading.Event()
        sampling = threading.Thread(target=self.sample, args=(over,))
        sampling.start()
        try:
            with self.load.run_clients():
                time.sleep(3)
                while time.monotonic() < self.ends and (left := self.select_unfinished_states()):
                    self.inject(self.choice.choice(left))
                    self.write()
                    time.sleep(self.choice.uniform(*APART_S))
        finally:
            over.set()
            sampling.join()
            self.attribute_late_actions()

    def attribute_late_actions(self) -> None:
        """Count what the log has told since: it is of a state of late, or nobody's."""
        now_s, allowed = time.monotonic() - self.began, {one.name: one.actions for one in STATES}
        lately = [one for one in reversed(self.injections) if now_s - (one.over_s or 0) < LATE_S]
        for line in self.tail.read_new_actions():
            done = action(line)
            for one in lately:
                if done in allowed[one.state]:
                    one.actions.append(done)
                    break
            else:
                self.unasked.append(line)

    def select_unfinished_states(self) -> list[State]:
        """The states that were not healed often enough; the chance of each is the same."""
        done = Counter(one.state for one in self.injections if one.took)
        return [one for one in self.states if done[one.name] < self.each]

    def inject(self, chosen: State) -> None:
        self.attribute_late_actions()
        lost_before, at = len(self.load.lost), time.monotonic()
        result = Injected(chosen.name, round(at - self.began, 1))
        self.injections.append(result)
        try:
            with chosen.made(self.server, self.load) as victims:
                at = time.monotonic()
                self.follow(chosen, victims, result, at)
        except (httpx.HTTPError, AssertionError, OSError) as error:
            result.took = False
            result.wrong.append(f"not injected: {type(error).__name__}: {error}")
        result.over_s = round(time.monotonic() - self.began, 1)
        lines, until = self.tail.read_new_actions(), time.monotonic() + TOLD_S
        while not lines and time.monotonic() < until:
            time.sleep(0.2)
            lines = self.tail.read_new_actions()
        result.took |= bool(lines)
        result.actions += [action(line) for line in lines]
        result.wrong += [line for line in lines if action(line) not in chosen.actions]
        sys.stderr.write(
            f"{time.strftime('%H:%M:%S')} {result.at_s:7.1f} s  {chosen.name}: "
            + (f"{result.healed_s} s" if result.took else "did not take")
            + f"  {result.actions} {result.wrong} {self.describe_lost_requests(lost_before)}\n"
        )

    def describe_lost_requests(self, first: int = 0) -> list[str]:
        """The requests of the load that were lost, and which states they met."""
        told = []
        for one in self.load.lost[first:]:
            began_s, ended_s = one.began - self.began, one.ended - self.began
            met = [
                each.state
                for each in self.injections
                if each.at_s < ended_s and (each.over_s is None or each.over_s > began_s)
            ]
            told.append(f"{one.at} {began_s:.1f} to {ended_s:.1f} s, {met}: {one.what}")
        return told

    def follow(self, chosen: State, victims: Victims, result: Injected, at: float) -> None:
        """Wait until a state is over."""
        if chosen.asks:
            time.sleep(PAUSE_S)
            self.server.cli("heal", "--resume", "-t", self.server.name, "--json")
        while time.monotonic() - at < PATIENCE_S:
            if victims.has_all_answers():
                took_s = time.monotonic() - at
                result.took = False  # unless the log tells of an action: it was over by itself
                result.healed_s = round(took_s, 1)
                result.wrong += victims.failure_messages
                break
            time.sleep(0.1)
        else:
            heal = self.server.cli("heal", "-t", self.server.name, "--json")
            result.wrong.append(f"not healed: {heal.out}")

    def sample(self, over: threading.Event) -> None:
        """Note the memory of each process."""
        while not over.wait(SAMPLE_S):
            with suppress(psutil.Error):
                self.memory.append(
                    {
                        role: psutil.Process(pid).memory_info().rss >> 10
                        for role, pid in self.server.pids().items()
                    }
                )

    def growth(self) -> dict[str, float]:
        """By role, the memory of the last tenth of the run as a share of that after a warm-up."""
        rows = self.memory[int(WARM_UP * len(self.memory)) :]
        some = max(len(rows) // 10, 1)
        return {
            role: round(
                statistics.median(row[role] for row in rows[-some:])
                / statistics.median(row[role] for row in rows[:some]),
                3,
            )
            for role in (rows[0] if rows else ())
        }

    def faults(self) -> list[str]:
        """What is wrong."""
        took = [one for one in self.injections if one.took]
        found = [f"{one.state} at {one.at_s} s: {text}" for one in took for text in one.wrong]
        found += [
            f"{one.state} at {one.at_s} s: it took {one.healed_s:.0f} s"
            for one in took
            if one.healed_s is not None and one.healed_s > HEALED_S
        ]
        found += [f"lost: {text}" for text in self.describe_lost_requests()]
        found += [f"nothing was wrong: {text}" for text in self.unasked]
        grown = self.growth().items()
        return found + [f"{role}: memory x {rate}" for role, rate in grown if rate > FLAT]

    def write(self) -> None:
        data = {
            "seed": self.seed,
            "seconds": round(time.monotonic() - self.began),
            "injections": [asdict(one) for one in self.injections],
            "requests": dict(self.load.done),
            "lost": self.describe_lost_requests(),
            "unasked": self.unasked,
            "memory_kib": self.memory[:: max(len(self.memory) // 500, 1)],
            "growth": self.growth(),
            "faults": self.faults(),
        }
        self.kept.write_text(json.dumps(data, indent=1))

    def table(self) -> str:
        """The summary."""
        rows = [f"{'state':26}{'injected':>9}{'healed':>8}{'median':>8}{'longest':>9}"]
        for one in self.states:
            took = [each for each in self.injections if each.state == one.name and each.took]
            times = [each.healed_s for each in took if each.healed_s is not None]
            middle = f"{statistics.median(times):.1f} s" if times else ""
            longest = f"{max(times):.1f} s" if times else ""
            rows.append(f"{one.name:26}{len(took):9}{len(times):8}{middle:>8}{longest:>9}")
        rows += [
            f"other requests: {sum(self.load.done.values()):,}, lost {len(self.load.lost)}",
            f"actions while nothing was injected: {len(self.unasked)}",
            f"memory, end by begin: {self.growth()}",
            *(f"WRONG {text}" for text in self.faults()),
        ]
        return "\n".join(rows)


def action(line: str) -> str:
    """The action that a line of the server's log tells of."""
    return line.partition(": ")[2].partition(",")[0]


@contextmanager
def start_healed_server(cli: Cli, place: Path) -> Iterator[Prone]:
    """A server of one's own with every defect, watched and healed."""
    environment = {
        "VLLMOPS_NO_PATCH": UNPATCHED,
        "VLLM_ENABLE_RESPONSES_API_STORE": "1",
        # oneDNN keeps the code for 1,024 shapes of matrices: the worker would grow for an hour.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    }
    options = (*hangs.ARGUMENTS, *hangs.make_connector_arguments("recompute"))
    with ExitStack() as after:
        server = after.enter_context(
            hangs.prone(
                cli, place, {"old_code": OLD_CACHE, **LOSING}, *options, environment=environment
            )
        )
        server.launched.wait_up()
        words = ("watch", "--heal", "-t", server.name, "-o", str(place / "bundles"))
        with (place / "watch.log").open("wb") as file:
            watch = cli.begin(*words, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        after.callback(watch.wait, 30)
        after.callback(watch.send_signal, signal.SIGINT)
        yield server


def main() -> int:
    """Soak a server of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=240.0, help="when to end at the latest")
    parser.add_argument("--each", type=int, default=50, help="how often each state is healed")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--only", action="append", default=[], help="a state; repeatable")
    parser.add_argument("--out", type=Path, default=Path("healing.json"))
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="vllmops-") as home:
        cli, place = Cli(Path(home)), Path(home) / "soak"
        place.mkdir()
        with start_healed_server(cli, place) as server:
            sys.stderr.write(f"seed {given.seed}, log {server.launched.log}\n")
            run = Run(
                server, Load(server.url), seed=given.seed, each=given.each,
                minutes=given.minutes, only=tuple(given.only), kept=given.out,
            )  # fmt: skip
            with suppress(KeyboardInterrupt):
                run.run()
            run.write()
            kept = given.out.with_suffix(".log")
            kept.write_bytes((place / "watch.log").read_bytes())
            given.out.with_suffix(".server.log").write_bytes(server.launched.log.read_bytes())
    sys.stdout.write(run.table() + "\n")
    return 1 if run.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
