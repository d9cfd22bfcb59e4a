"""The database servers that tests start are theirs, and live as long as these need them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...support.databases import Servers, ValkeyServer, folder_for_servers
from ...support.own_processes import in_home


def test_a_server_is_not_in_the_state_directory_of_the_test_that_starts_it(
    home: Path, servers: Servers
) -> None:
    """What is started there ends with the test; servers that are shared are needed after it."""
    assert not in_home(servers.postgres().process.pid, home)


def test_another_server_on_the_port_is_not_taken_for_ours(servers: Servers) -> None:
    there = servers.valkey()
    ours = ValkeyServer(folder_for_servers())
    ours.port = there.port
    with pytest.raises(AssertionError, match="Address already in use"):
        ours.start()
