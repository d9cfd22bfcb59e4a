"""Other nodes of a server: real addresses in a network namespace, and a link that is cut."""

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from vllmops.collect.machine.connected_nodes import (
    find_node_addresses,
    find_unresponsive_nodes,
    parse_kernel_address,
)
from vllmops.collect.machine.processes import Process
from vllmops.model.roles import Role
from vllmops.supervision.node_status import PORT, is_reachable

from ..support.children import Spawn
from ..support.extent import long
from ..support.remote_machine import ip, network, start_in_namespace
from ..support.waiting import until

# Takes every connection; it says where, and when somebody asks whether the host is there.
NODE = f"""
import socket, sys
asked, taken = (socket.create_server((sys.argv[1], port)) for port in ({PORT}, 0))
print(taken.getsockname()[1], flush=True)
while asked.accept():
    print("asked", flush=True)
"""


@pytest.fixture
def node() -> Iterator[tuple[str, str, int, IO[str]]]:
    """A node's link, address and port, and what it writes."""
    with network() as (name, there), start_in_namespace(name, "-c", NODE, there) as output:
        yield name, there, int(output.readline()), output


def test_a_node_whose_network_is_cut_is_named(
    lab: Any, vllmops: Any, node: tuple[str, str, int, IO[str]]
) -> None:
    link, there, port, output = node
    lab.serve("a", node=f"{there}:{port}")
    assert output.readline() == output.readline() == "asked\n"
    assert lab.record("a").note == ""
    ip(f"-n {link} link set far down")
    until(lambda: lab.record("a").note)
    (row,) = vllmops("ps", "--json").data["instances"]
    assert (row["state"], row["note"]) == ("ready", f"node {there} does not answer")
    assert row["note"] in vllmops("ps").out
    ip(f"-n {link} link set far up")
    until(lambda: not lab.record("a").note)


@long
def test_failure_cause_names_the_lost_node(lab: Any, node: tuple[str, str, int, IO[str]]) -> None:
    link, there, port, output = node
    record = lab.serve("a", node=f"{there}:{port}")
    assert output.readline() == "asked\n"
    ip(f"-n {link} link set far down")
    until(lambda: lab.record("a").note)
    lab.kill(lab.process("a", "worker").pid)
    until(lambda: lab.state("a") == "failed")
    assert f"node {there} is gone" in lab.record("a").failure.cause
    lab.nothing_left(record)


def test_peers_of_an_api_server_are_not_nodes(node: tuple[str, str, int, IO[str]]) -> None:
    _, there, port, _ = node
    with socket.create_connection((f"::ffff:{there}", port)):  # as gRPC does
        assert find_node_addresses([Process(Role.ENGINE, os.getpid(), 1)], None) == {there}
        assert find_node_addresses([Process(Role.API, os.getpid(), 1)], None) == set()


def test_a_node_of_a_server_without_a_supervisor(
    node: tuple[str, str, int, IO[str]], spawn: Spawn, vllmops: Any, home: Path
) -> None:
    link, there, port, _ = node
    engine = spawn("VLLM::EngineCore_DP0", Role.ENGINE, home)
    engine.run(f"import socket; far = socket.create_connection(({there!r}, {port}))")
    assert find_unresponsive_nodes([engine.process], None) == set()
    ip(f"-n {link} link set far down")
    engine.run("far.send(b'work')")
    until(lambda: find_unresponsive_nodes([engine.process], None) == {there})

    def row() -> Any:
        rows = vllmops("ps", "--json").data["instances"]
        return next(row for row in rows if row["pid"] == engine.process.pid)

    assert row()["note"] == f"node {there} does not answer"
    (part,) = (
        part
        for part in vllmops("doctor", "-t", str(engine.process.pid), "--json").data["unseen"]
        if part["code"] == "agent.node-lost"
    )
    assert there in part["why"]
    ip(f"-n {link} link set far up")
    until(lambda: not row()["note"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("0100007F", "127.0.0.1"),
        ("0000000000000000FFFF00000203CB0A", "10.203.3.2"),
        ("B80D01200000000067452301EFCDAB89", "2001:db8::123:4567:89ab:cdef"),
    ],
)
def test_addresses_in_the_tables_of_the_kernel(words: str, text: str) -> None:
    assert parse_kernel_address(words) == text


def test_without_a_descriptor_left_no_node_is_missing() -> None:
    async def check_without_descriptors() -> bool | None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            return await is_reachable("127.0.0.1")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert asyncio.run(check_without_descriptors()) is None
