"""``restart --hand-over``: a second server takes over while requests go on, and none is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

from ..support.extent import long
from .conftest import Cli, Footprint, Live

RATE = 20.0


@contextmanager
def requests(server: Live) -> Iterator[list[str]]:
    """Requests at a steady rate, half of them over connections that are kept; what went wrong."""
    wrong, over = list[str](), threading.Event()
    url, body = f"{server.url}/v1/completions", {"model": "demo-text", "prompt": "a"}

    def send_completion(client: httpx.Client) -> None:
        try:
            answer = client.post(url, json={**body, "max_tokens": 2})
            if answer.status_code != 200:
                wrong.append(f"{answer.status_code} {answer.text}")
        except httpx.HTTPError as error:
            wrong.append(repr(error))

    def submit_completions(pool: ThreadPoolExecutor) -> None:
        # The server closes what idles for 5 s, perhaps just as it is used again.
        kept = httpx.Client(timeout=60, limits=httpx.Limits(keepalive_expiry=3))
        fresh = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
        with kept, fresh:
            while not over.wait(2 / RATE):
                for client in (kept, fresh):
                    pool.submit(send_completion, client)
            pool.shutdown()

    thread = threading.Thread(target=submit_completions, args=(ThreadPoolExecutor(32),))
    thread.start()
    try:
        yield wrong
    finally:
        over.set()
        thread.join()


def stream(server: Live, tokens: int) -> list[str]:
    """The lines of a stream."""
    body = {"model": "demo-text", "prompt": "a", "max_tokens": tokens, "stream": True}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json={**body, "ignore_eos": True}, timeout=120) as answer:
        return [line for line in answer.iter_lines() if line]


@long
def test_a_hand_over_loses_no_request(cli: Cli) -> None:
    server = cli.serve("handed", "--demo", "text")
    try:
        before = server.footprint()
        with ThreadPoolExecutor(1) as pool, requests(server) as wrong:
            time.sleep(1)
            handing = pool.submit(cli, "restart", "handed", "--hand-over", "--json")
            others = set()
            while not handing.done():
                others |= {
                    (row["state"], row["started_by_vllmops"])
                    for row in cli("ps", "--json").data["instances"]
                    if row["url"] == server.url and row["name"] is None
                }
                lines = stream(server, 1500)
                assert lines[-1] == "data: [DONE]"
                assert '"finish_reason":"length"' in lines[-2]  # several tokens may share a line
            time.sleep(2)
        assert handing.result().code == 0, handing.result()
        assert others == {("handing over", True)}
        assert wrong == []
        assert not set(before.pids) & set(server.footprint().pids)
        before = Footprint(before.pids, None, before.segments)  # the port is the second one's
        assert before.list_leftovers() == []
        assert server.row["state"] == "ready"
        model = next(Path(cli.home / "demo").glob("text*"))
        away = model.rename(model.with_name("away"))
        try:
            pids = server.footprint().pids
            with requests(server) as wrong:
                ran = cli("restart", "handed", "--hand-over", "--json")
            assert (ran.code, ran.error["code"]) == (1, "restart.no-hand-over")
            assert "the second server failed" in ran.error["message"]
            assert wrong == []
            assert server.footprint().pids == pids
        finally:
            away.rename(model)
    finally:
        cli("stop", "handed", "--force")
