"""A connection of OpenSSH's client to its server, which runs for this connection alone.

The server is of the path or of Debian's package. As root it wants a user and a folder of its own:
it has them in a mount namespace, and the machine stays as it is.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shlex
import shutil
import struct
import subprocess
import termios
import time
from pathlib import Path

import pytest

from .debian import get_package_folder

WITHIN_S = 40.0
# Sequences that set modes and colours, move, and name the window.
SEQUENCE = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|[\]P_][^\x07\x1b]*(\x07|\x1b\\)|[()][A-Z0-9]|.)")


def server(folder: Path) -> str:
    """The command that serves one connection on its standard streams; skips without one.

    Args:
        folder: gets the keys and the configuration.
    """
    for needed in ("ssh", "ssh-keygen", "unshare"):
        if shutil.which(needed) is None:
            pytest.skip(f"there is no {needed}")
    program, libraries = shutil.which("sshd", path=os.defpath + ":/usr/sbin:/sbin"), ""
    if program is None:
        unpacked_at, why = get_package_folder("openssh-server", "libwrap0")
        if unpacked_at is None:
            pytest.skip(f"there is no sshd: {why}")
        program = str(unpacked_at / "usr/sbin/sshd")
        libraries = ":".join(str(at) for at in unpacked_at.glob("*/lib/*") if at.is_dir())
        libraries += "".join(f":{at}" for at in unpacked_at.glob("lib/*") if at.is_dir())
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
        )
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        "StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n"
    )
    runs = f"exec {shlex.quote(program)} -i -e -f {folder}/sshd_config"
    if libraries:
        runs = f"LD_LIBRARY_PATH={shlex.quote(libraries)} {runs}"
    if os.getuid():
        return runs
    users = Path("/etc/passwd").read_text("utf-8")
    (folder / "passwd").write_text(f"{users}sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n")
    script = folder / "serve.sh"
    script.write_text(
        f"mount --bind {folder}/passwd /etc/passwd && mount -t tmpfs none /run"
        f" && mkdir -m 755 /run/sshd && {runs}\n"
    )
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("a mount namespace, which sshd gets as root, can't be had here")
    return f"unshare -m sh {script}"


class Session:
    """A command in a terminal of 80 columns and 24 lines, over ssh.

    Args:
        folder: has the keys and the configuration of `server`.
        serve: the command of `server`.
        command: a line for the shell of the other side.
        term: the kind of terminal.
    """

    def __init__(self, folder: Path, serve: str, command: str, term: str = "xterm-256color"):
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        options = {
            "BatchMode": "yes",
            "IdentitiesOnly": "yes",
            "LogLevel": "ERROR",
            "ProxyCommand": serve,
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": "/dev/null",
        }
        words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        self.popen = subprocess.Popen(
            ["ssh", "-F", "none", "-tt", "-i", folder / "user", *words, "there", command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=os.environ | {"TERM": term},
        )
        os.close(theirs)
        self.raw = b""

    def type(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    @property
    def text(self) -> str:
        """All that was written so far, without escape sequences."""
        return SEQUENCE.sub(b"", self.raw).decode("utf-8", "replace")

    def read(self, within_s: float, bytes_per_s: float = 0) -> bool:
        """Take what has come, as fast as the link allows it; False at the end."""
        most = int(bytes_per_s * within_s) or 1 << 16
        if bytes_per_s:
            time.sleep(within_s)
        if not select.select([self.ours], [], [], within_s)[0]:
            return True
        try:
            found = os.read(self.ours, most)
        except OSError:  # the client has closed its side
            return False
        self.raw += found
        return bool(found)

    def shows(self, text: str, bytes_per_s: float = 0) -> None:
        """Wait until the terminal was sent a text."""
        end_s = time.monotonic() + WITHIN_S
        while text not in self.text:
            assert self.read(0.1, bytes_per_s), self.text[-2000:]
            assert time.monotonic() < end_s, self.text[-2000:]

    def wait_for_exit(self) -> int:
        """Read until the client ends; its exit code, which is that of the command."""
        end_s = time.monotonic() + WITHIN_S
        while self.read(0.1):
            assert time.monotonic() < end_s, self.text[-2000:]
        return self.popen.wait(10)

    def drop(self) -> None:
        """Lose the connection, as a closed laptop does."""
        self.popen.kill()
        self.popen.wait(10)

    def close(self) -> None:
        if self.popen.poll() is None:
            self.drop()
        os.close(self.ours)
