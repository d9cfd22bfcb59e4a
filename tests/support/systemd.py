"""A real systemd, as it boots a container: in namespaces of its own, with few units.

And the unit of ``vllmops integrate systemd`` in it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Final

import pytest

from vllmops.servers.record import RECORDS, InstanceRecord

from .commands import run_vllmops
from .waiting import until

SYSTEMD: Final = Path("/lib/systemd/systemd")
CGROUPS: Final = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))  # of a hybrid, of v2
NEEDED: Final = ("default", "sysinit", "basic", "shutdown", "multi-user", "network-online")
TARGET: Final = "[Unit]\nDescription=An empty {}.target\nDefaultDependencies=no\n"
DROP_IN: Final = """[Service]
Environment="PYTHONPATH={path}"
StandardOutput=append:/var/log/%i.log
StandardError=append:/var/log/%i.log
{more}
"""
# What it writes below /etc and /var is gone with it. Its network is its own, too.
BOOT: Final = """
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
umount -R /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
for folder in etc var; do
    mkdir -p /run/over/$folder /run/over/$folder-work
    layers=lowerdir=/$folder,upperdir=/run/over/$folder,workdir=/run/over/$folder-work
    mount -t overlay -o $layers overlay /$folder
done
exec "$0" --system --log-target=null --show-status=no --crash-shell=no
"""


class BootError(Exception):
    """systemd does not come up in namespaces here."""


class Systemd:
    """systemd as the first process of a container.

    Args:
        pid: its pid, seen from here.
        units: the folder of its units.
    """

    def __init__(self, pid: int, units: Path) -> None:
        self.pid = pid
        self.units = units

    def inside(self, words: Sequence[str]) -> tuple[str, ...]:
        """What runs a program there, as root."""
        return ("nsenter", "-t", str(self.pid), "--all", *words)

    def run(self, *words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a program there to its end."""
        return subprocess.run(
            self.inside(words), capture_output=True, text=True, check=False, timeout=timeout_s
        )

    @cached_property
    def version(self) -> int:
        return int(self.ctl("--version").split()[1])

    @contextmanager
    def start_program(self, *words: str) -> Iterator[IO[str]]:
        """The output of a program that runs there until the block ends."""
        with subprocess.Popen(self.inside(words), stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            try:
                yield program.stdout
            finally:
                program.kill()

    def ctl(self, *words: str, timeout_s: float = 60) -> str:
        """What a command of ``systemctl`` prints that has to succeed."""
        ran = self.run("systemctl", "--no-pager", *words, timeout_s=timeout_s)
        assert ran.returncode == 0, (words, ran.stdout, ran.stderr)
        return ran.stdout


def hindrance() -> str:
    """Why none can be booted here; empty if one may."""
    if not SYSTEMD.exists():
        return f"{SYSTEMD} is not installed"
    if os.geteuid() != 0:
        return "only root can boot it in namespaces"
    if missing := [name for name in ("unshare", "nsenter", "systemctl") if not shutil.which(name)]:
        return f"there is no {', '.join(missing)}"
    if not any((place / "cgroup.procs").exists() for place in CGROUPS):
        return "this machine has no control groups of version 2"
    return ""


@contextmanager
def boot_systemd(folder: Path) -> Iterator[Systemd]:
    """One that runs until the block ends, and all that it started with it.

    Args:
        folder: an empty one, which its units can read.

    Raises:
        BootError: it can't be booted here.
    """
    place = next(place for place in CGROUPS if (place / "cgroup.procs").exists())
    units, none, own = folder / "units", folder / "none", place / f"vo-{os.getpid()}"
    for made in (units, none, own):
        made.mkdir()
    for name in NEEDED:
        (units / f"{name}.target").write_text(TARGET.format(name))
    options = ("--mount", "--mount-proc", "--pid", "--fork", "--kill-child", "--uts", "--ipc")
    words = ("unshare", *options, "--cgroup", "--net", "sh", "-ec", BOOT, str(SYSTEMD))
    environment = {
        "PATH": os.environ["PATH"],
        "container": "vllmops",
        "SYSTEMD_UNIT_PATH": str(units),
        "SYSTEMD_GENERATOR_PATH": str(none),
        "SYSTEMD_ENVIRONMENT_GENERATOR_PATH": str(none),
    }
    # A shell goes there first: `unshare` makes the group that it is in the root of its own.
    enter = f'echo $$ > {own}/cgroup.procs && exec "$@"'
    with (folder / "boot.log").open("wb") as log:
        outer = subprocess.Popen(
            ("sh", "-c", enter, "-", *words), env=environment, stdout=log, stderr=log
        )
    try:
        yield Systemd(wait_for_boot(outer, folder / "boot.log"), units)
    finally:
        outer.kill()  # its child is the first process of the namespace, and ends with it
        outer.wait(10)
        for group in sorted(own.glob("**/"), reverse=True):
            until(partial(try_remove_group, group), 10)


def wait_for_boot(outer: subprocess.Popen[bytes], log: Path) -> int:
    """The pid of systemd, once it answers."""
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and outer.poll() is None:
        with suppress(OSError, ValueError, subprocess.TimeoutExpired):
            made = Systemd(int(children.read_text()), log)
            if made.run("systemctl", "is-system-running", timeout_s=5).stdout.strip() == "running":
                return made.pid
        time.sleep(0.1)
    if outer.poll() is None:
        outer.send_signal(signal.SIGKILL)
    raise BootError(f"it does not boot in namespaces here: {log.read_text().strip()}")


def try_remove_group(group: Path) -> bool:
    """Whether a control group is gone; it can go once it has no process."""
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


class Service:
    """``vllmops@a``, as the user ``vllm``.

    Args:
        manager: systemd.
    """

    unit: Final = "vllmops@a"

    def __init__(self, manager: Systemd) -> None:
        self.manager = manager

    def configure(self, text: str) -> None:
        """Give it the file that `serve --config` reads, from its next start on."""
        self.manager.run("mkdir", "-p", "/etc/vllmops")
        write = ("sh", "-c", 'printf %s "$1" > "$0"', "/etc/vllmops/a.toml", text)
        assert self.manager.run(*write).returncode == 0

    def start(self, timeout_s: float = 60) -> None:
        self.manager.ctl("start", self.unit, timeout_s=timeout_s)

    def begin(self, what: str = "start") -> None:
        """Start or stop it, and do not wait for that."""
        self.manager.ctl(what, "--no-block", self.unit)

    def end(self) -> None:
        """Stop it, and have systemd forget how often it failed."""
        self.manager.ctl("stop", self.unit)
        self.manager.run("systemctl", "reset-failed", self.unit)

    def shows(self, name: str) -> str:
        """A property of the unit."""
        shown = self.manager.ctl("show", self.unit, f"--property={name}", "--value")
        return shown.strip()

    @property
    def state(self) -> str:
        return self.shows("ActiveState")

    @property
    def status(self) -> str:
        return self.shows("StatusText")

    @property
    def restarts(self) -> int:
        return int(self.shows("NRestarts"))

    def is_up(self) -> bool:
        return self.state == "active"

    def has_restarted(self, times: int) -> bool:
        return self.restarts == times and self.is_up()

    @property
    def record(self) -> InstanceRecord:
        read = self.manager.run("cat", "/var/lib/vllmops/instances/a/instance.json")
        return RECORDS.decode(read.stdout)

    @property
    def bundles(self) -> list[str]:
        return self.manager.run("ls", "/var/lib/vllmops/bundles").stdout.split()

    @property
    def log(self) -> str:
        return self.manager.run("cat", "/var/log/a.log").stdout

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal a process of the server; ``serve`` is the service's main one."""
        pids = {str(process.role): process.pid for process in self.record.processes}
        pid = self.shows("MainPID") if role == "serve" else pids[role]
        assert self.manager.run("kill", f"-{number:d}", str(pid)).returncode == 0


@contextmanager
def install_service(drop_in: str, *folders: Path) -> Iterator[Service]:
    """The unit in a systemd that runs until the block ends; skips where none can be booted.

    Args:
        drop_in: what else is to be in its section ``[Service]``.
        folders: where its Python looks first.
    """
    if why := hindrance():
        pytest.skip(f"no real systemd: {why}")
    path = os.pathsep.join([*map(str, folders), *map(os.path.abspath, filter(None, sys.path))])
    with tempfile.TemporaryDirectory(prefix="vo-systemd-") as name:
        place = Path(name)
        place.chmod(0o755)
        try:
            with boot_systemd(place) as manager:
                unit = manager.units / "vllmops@.service"
                unit.write_text(run_vllmops("integrate", "systemd").out)
                more = Path(f"{unit}.d")
                more.mkdir()
                (more / "test.conf").write_text(DROP_IN.format(path=path, more=drop_in))
                assert manager.run("useradd", "--system", "vllm").returncode == 0
                manager.ctl("daemon-reload")
                yield Service(manager)
        except BootError as error:
            pytest.skip(f"no real systemd: {error}")
