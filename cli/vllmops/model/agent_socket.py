"""The place and the limits of the agents' Unix sockets, for both ends."""

from pathlib import Path

from .process_identity import read_boot_id

DIRECTORY = "agents"  # below the state directory
PATH_BYTES = 107  # sun_path of unix(7), without its final NUL
BODY_BYTES = 4 << 20  # of a request; some 60,000 cache keys


def get_socket_directory(home: Path) -> Path:
    """The directory of the sockets and heartbeats below a state directory.

    One for each boot of each machine: homes are on a network in many clusters, and pids mean
    nothing to another machine.
    """
    return home / DIRECTORY / (read_boot_id()[:8] or "boot")
