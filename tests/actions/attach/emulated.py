"""Runs the tests of injection on an emulated arm64 machine: a real kernel, and a real Python.

    python tests/actions/attach/emulated.py FOLDER

It makes a guest in that folder of Debian's packages for arm64 and of Python's wheels for it, and
boots that with qemu-system-aarch64. It needs apt, dpkg-deb and cpio, and takes some three minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("python3.11", "libpython3.11", "busybox-static", "linux-image-arm64")
WHEELS = ("httpx", "msgspec", "platformdirs", "psutil", "py-spy", "pyelftools", "pytest", "rich")
PLATFORMS = ("manylinux2014_aarch64", "manylinux_2_28_aarch64")
MEMORY_MIB, LIMIT_S = 2048, 900
INIT = """#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t tmpfs tmp /tmp
/bin/busybox --install -s /bin
export PATH=/usr/bin:/bin HOME=/root PYTHONPATH=/py:/src
cd /src
uname -a
python3.11 -m pytest -p no:cacheprovider --color=no --import-mode=importlib --rootdir=/src tests
echo "tests ended with $?"
poweroff -f
"""


def packages(folder: Path) -> tuple[Path, Path]:
    """Unpack Debian's packages: the root, and the kernel's folder."""
    for name in ("lists/partial", "archives/partial"):
        (folder / "apt" / name).mkdir(parents=True)
    (folder / "apt/status").touch()
    options = {
        "Dir::State": folder / "apt",
        "Dir::State::status": folder / "apt/status",
        "Dir::Cache": folder / "apt",
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-qq", *(f"--option={name}={value}" for name, value in options.items())]
    run(*apt, "update")
    run(*apt, "install", "--yes", "--no-install-recommends", "--download-only", *PACKAGES)
    root, kernel = folder / "root", folder / "kernel"
    for package in (folder / "apt/archives").glob("*.deb"):
        into = kernel if package.name.startswith("linux-image") else root
        run("dpkg-deb", "--extract", str(package), str(into))
    return root, kernel / "boot"


def wheels(folder: Path, into: Path) -> None:
    """Unpack Python's packages."""
    where = [f"--platform={platform}" for platform in PLATFORMS]
    pip = [sys.executable, "-m", "pip", "--quiet", "download", "--only-binary=:all:"]
    run(*pip, "--python-version=3.11", *where, f"--dest={folder / 'wheels'}", *WHEELS)
    for wheel in (folder / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)


def guest(folder: Path) -> tuple[Path, Path]:
    """Make the guest: its kernel, and the archive that is its root."""
    root, boot = packages(folder)
    wheels(folder, root / "py")
    for name in ("proc", "sys", "dev", "tmp", "root"):
        (root / name).mkdir(exist_ok=True)
    shutil.copytree(ROOT / "cli/vllmops", root / "src/vllmops")
    for name in ("tests/actions/attach/test_injector.py", "tests/support/waiting.py"):
        (root / "src" / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, root / "src" / name)
    (root / "init").write_text(INIT)
    (root / "init").chmod(0o755)
    archive = folder / "root.cpio"
    with archive.open("wb") as file:
        names = b"\n".join(os.fsencode(path.relative_to(root)) for path in root.rglob("*"))
        subprocess.run(
            ["cpio", "--create", "--format=newc", "--quiet"],
            cwd=root,
            input=names,
            stdout=file,
            check=True,
        )
    return next(boot.glob("vmlinuz-*")), archive


def boot_guest(kernel: Path, archive: Path) -> str:
    """Boot the guest until it turns itself off; what it printed."""
    qemu = ["qemu-system-aarch64", "-machine", "virt", "-cpu", "max,pauth-impdef=on", "-smp", "2"]
    qemu += ["-m", str(MEMORY_MIB), "-nographic", "-nic", "none", "-no-reboot"]
    qemu += ["-kernel", str(kernel), "-initrd", str(archive)]
    qemu += ["-append", "console=ttyAMA0 quiet panic=-1 rdinit=/init"]
    done = subprocess.run(
        qemu,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
        check=True,
    )
    return done.stdout


def run(*words: str) -> None:
    subprocess.run(words, check=True)


if __name__ == "__main__":
    print(boot_guest(*guest(Path(sys.argv[1]))))
