"""A server on several machines, by the URL of its API server: each node has its namespaces."""

from __future__ import annotations

import socket
import ssl
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from vllmops.collect.agents.node_certificate import make_tls_context
from vllmops.model.admin_api import USUAL_NODE_PORT
from vllmops.model.environment import ADMIN_TOKEN_FILE
from vllmops.model.roles import Role

from ..support.children import CHILD, Child, start_child
from ..support.commands import Vllmops
from ..support.fleet import SERVING, TOKEN, token_file
from ..support.ranked import make_rank_code
from ..support.remote_machine import ip, machine, network
from ..support.waiting import until

SIZES = (2, 1, 1)
# As a process of Ray's takes itself for one.
ACTOR = """
import sys, types
worker = types.SimpleNamespace(mode=1)
sys.modules["ray._private.worker"] = types.SimpleNamespace(global_worker=worker)
"""
TAKE = """
import socket
taking = socket.create_server(("", 0))
out = taking.getsockname()[1]
"""
CONNECT = """
import socket
joined = socket.create_connection(({address!r}, {port}))
"""


@dataclass
class Nodes:
    """Two nodes of a server.

    Args:
        near: the API server.
        far: the engine on the other node.
        link: the name of its network.
        address: of the other node.
        url: of the API server.
        token: the file with the admin token.
        theirs: that of the other node.
    """

    near: Child
    far: Child
    link: str
    address: str
    url: str
    token: Path
    theirs: Path

    def words(self) -> tuple[str, ...]:
        return ("-t", self.url, "--admin-token", str(self.token), "--json")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    children, tmp_path = [], tmp_path_factory.mktemp("nodes")

    def start(name: str, title: str, where: str, token: Path) -> Child:
        inside, place = machine(name, where), {ADMIN_TOKEN_FILE: str(token)}
        children.append(start_child(title, Role.OTHER, tmp_path / name, inside, **place))
        return children[-1]

    with network() as (link, address):
        token = token_file(tmp_path)
        (theirs := tmp_path / "theirs").write_text(TOKEN)
        theirs.chmod(0o600)
        try:
            near = start("one", "VLLM::APIServer", "", token)
            url = f"http://127.0.0.1:{eval(near.run(SERVING))[0]}"
            near.run(make_rank_code("api", sizes=SIZES, local=1))
            far = start("two", "VLLM::EngineCore_DP1", link, theirs)
            far.run(ACTOR)
            # The port opens with the first object that the agent sees, and knows whose it is.
            far.run(make_rank_code("engine", instance="2", dp=1, sizes=SIZES, local=1))
            far.run(
                "from vllmops.agent.transport import unix_socket as service; service.start_agent()"
            )
            port = int(far.run(TAKE))
            engine = repr(CONNECT.format(address=address, port=port)) + "\n"
            near.run(f"below[0].stdin.write({engine.encode()!r}); below[0].stdin.flush()")
            near.run("out = below[0].stdout.readline()")
            yield Nodes(near, far, link, address, url, token, theirs)
        finally:
            for child in children:
                child.kill()


def instance(vllmops: Vllmops, nodes: Nodes) -> Any:
    """What `ps` says of the server."""
    answer = vllmops("ps", *nodes.words())
    assert answer.code == 0, answer
    (row,) = answer.data["instances"]
    return row


def rows(vllmops: Vllmops, nodes: Nodes) -> dict[str, str]:
    """The engines by rank and node, and what `ps` says of their agents."""
    processes = instance(vllmops, nodes)["processes"]
    return {f"{p['ranks']} {p['node']}": p["agent"] for p in processes if p["role"] == "engine"}


@pytest.fixture(autouse=True)
def usual(patience: pytest.MonkeyPatch) -> None:
    """Here nodes are silent."""
    patience.undo()


def test_node_with_another_token_exchanges_nothing(vllmops: Vllmops, nodes: Nodes) -> None:
    nodes.theirs.write_text("another-" * 8)
    try:
        until(lambda: "another admin token" in instance(vllmops, nodes)["note"])
        assert nodes.address in instance(vllmops, nodes)["note"]
        assert rows(vllmops, nodes).get("DP1 two") != "answers"
        examined = vllmops("doctor", *nodes.words()).data["unseen"]
        parts = [part["why"] for part in examined if part["code"] == "agent.node-lost"]
        assert any("another admin token" in why for why in parts)
    finally:
        nodes.theirs.write_text(TOKEN)


def test_every_command_sees_the_ranks_of_the_other_node(vllmops: Vllmops, nodes: Nodes) -> None:
    both = {"DP1 one": "answers", "DP1 two": "answers"}
    until(lambda: rows(vllmops, nodes) == both, explain=lambda: rows(vllmops, nodes))
    answer = vllmops("cache", "inspect", *nodes.words())
    assert (answer.code, answer.data["silent"]) == (0, []), answer
    dumped = vllmops("stacks", "dump", *nodes.words()).data["processes"]
    (theirs,) = (process for process in dumped if process["node"] == "two")
    assert any(thread["name"] == "vllmops-node" for thread in theirs["threads"])
    examined = vllmops("doctor", *nodes.words())
    assert [part["code"] for part in examined.data["unseen"]] == ["remote"], examined


def test_a_node_whose_network_is_cut_is_named_and_holds_nobody_up(
    vllmops: Vllmops, nodes: Nodes
) -> None:
    until(lambda: len(rows(vllmops, nodes)) == 2)
    ip(f"-n {nodes.link} link set far down")
    lost = {"DP1 one": "answers", "DP1 two": "node-lost"}
    until(lambda: rows(vllmops, nodes) == lost, explain=lambda: rows(vllmops, nodes))
    note = instance(vllmops, nodes)["note"]
    assert f"node two ({nodes.address}) does not answer" in note
    (silent,) = vllmops("cache", "inspect", *nodes.words()).data["silent"]
    assert (silent["node"], silent["code"]) == ("two", "agent.node-lost")
    assert "two" in silent["why"]
    watched = vllmops("watch", *nodes.words(), "--for", "2").data["events"]
    assert ["node two" in event["text"] for event in watched if event["event"] == "trouble"] == [
        True
    ]
    ip(f"-n {nodes.link} link set far up")
    until(lambda: "node-lost" not in rows(vllmops, nodes).values())


def test_the_port_speaks_with_nobody_without_the_token(nodes: Nodes) -> None:
    for made in (
        None,
        ssl._create_unverified_context(),
        make_tls_context("guess-" * 8, server=False),
    ):
        with socket.create_connection((nodes.address, USUAL_NODE_PORT), 5) as plain:
            asked = b"GET /v1/vllmops/processes HTTP/1.0\r\n\r\n"
            try:
                line = made.wrap_socket(plain) if made else plain
                line.sendall(asked)
                assert line.recv(100) == b""
            except OSError:
                continue


def test_node_refuses_foreign_processes_and_unknown_routes(vllmops: Vllmops, nodes: Nodes) -> None:
    """Only its own processes, only the routes that the API server's node has, too."""
    until(lambda: len(rows(vllmops, nodes)) == 2)
    headers = {"Authorization": f"Bearer {nodes.token.read_text().strip()}"}
    for path, status in (
        (f"1@{nodes.address}/prompt", 404),
        (f"99999@{nodes.address}/hello", 404),
        ("1@192.0.2.1/hello", 404),
        (f"1@{nodes.address}@{nodes.address}/hello", 404),
    ):
        answer = httpx.get(f"{nodes.url}/v1/vllmops/processes/{path}", headers=headers, timeout=60)
        assert answer.status_code == status, (path, answer.text)


def test_stopped_process_of_a_node_hides_no_other_process(vllmops: Vllmops, nodes: Nodes) -> None:
    """Ray's actors listen side by side: the kernel may give a connection to one that is stopped."""
    code = (
        "import subprocess; actor = subprocess.Popen([{title!r}, {child!r}], "
        "executable={python!r}, stdin=-1, stdout=-1, text=True)\n"
        "def tell(code):\n"
        "    actor.stdin.write(repr(code) + chr(10)); actor.stdin.flush()\n"
        "    return actor.stdout.readline()\n"
        "actor.stdout.readline()"
    ).format(title="VLLM::Worker_DP1", child=str(CHILD), python=sys.executable)
    nodes.far.run(code)
    listen = "from vllmops.agent.transport import unix_socket as service; service.start_agent()"
    for line in (ACTOR, make_rank_code("worker", instance="2", dp=1, sizes=SIZES, local=1), listen):
        assert "Traceback" not in nodes.far.run(f"out = tell({line!r})")
    until(lambda: "DP1 two" in rows(vllmops, nodes))
    nodes.far.run("import os, signal; os.kill(actor.pid, signal.SIGSTOP)")
    # A busy machine may take its time.
    nodes.near.run(
        "from vllmops.agent.transport import server_members as remote; remote.NODE_S = 6.0"
    )
    looks = [rows(vllmops, nodes)["DP1 two"] for _ in range(4)]
    assert looks.count("answers") >= 3, looks
