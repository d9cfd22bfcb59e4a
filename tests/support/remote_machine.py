"""Another machine, as far as a network can tell: a namespace, and a server with TLS in it."""

from __future__ import annotations

import datetime
import ipaddress
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from . import herd
from .fleet import TOKEN
from .ports import slot


@contextmanager
def network() -> Iterator[tuple[str, str]]:
    """A namespace with an address of its own, and a link to it; both have the name."""
    number = slot()
    name, near, there = f"vo{number}", f"10.203.{number}.1", f"10.203.{number}.2"
    forget(name)
    ip(f"netns add {name}")
    try:
        ip(f"link add {name} type veth peer name far netns {name}")
        ip(f"addr add {near}/30 dev {name}")
        ip(f"link set {name} up")
        ip(f"-n {name} addr add {there}/30 dev far")
        ip(f"-n {name} link set far up")
        yield name, there
    finally:
        forget(name)


def forget(name: str) -> None:
    """Remove a namespace and the link to it, also those of an earlier process with this number."""
    # The kernel takes its time to end a namespace, and the link with it.
    for words in (f"link del {name}", f"netns del {name}"):
        subprocess.run(["ip", *words.split()], check=False, stderr=subprocess.DEVNULL)


@contextmanager
def open_namespaces(count: int) -> Iterator[list[tuple[str, str]]]:
    """Namespaces that reach each other and this machine; each with its address."""
    number = slot()
    bridge = f"vob{number}"
    made = [(f"{bridge}n{n}", f"10.204.{number}.{n + 2}") for n in range(count)]
    for name in (*(name for name, _ in made), bridge):
        forget(name)
    ip(f"link add {bridge} type bridge")
    try:
        ip(f"addr add 10.204.{number}.1/24 dev {bridge}")
        ip(f"link set {bridge} up")
        for name, address in made:
            ip(f"netns add {name}")
            ip(f"link add {name} type veth peer name far netns {name}")
            ip(f"link set {name} master {bridge} up")
            ip(f"-n {name} addr add {address}/24 dev far")
            for device in ("far", "lo"):
                ip(f"-n {name} link set {device} up")
        yield made
    finally:
        for name in (*(name for name, _ in made), bridge):
            forget(name)


def machine(name: str, network: str = "", memory: str = "") -> tuple[str, ...]:
    """What runs a program on a machine of its own: with a name, processes and shared memory.

    Args:
        name: of the host.
        network: the namespace; empty for this machine's own network.
        memory: a folder for shared memory that several machines share; empty for none.
    """
    shared = f"mount --bind {memory} /dev/shm" if memory else "mount -t tmpfs tmpfs /dev/shm"
    inside = f'mount -t proc proc /proc; {shared}; hostname {name}; exec "$@"'
    unshare = ("unshare", "--pid", "--fork", "--mount", "--uts", "--ipc", "--kill-child")
    where = ("ip", "netns", "exec", network) if network else ()
    return (*where, *unshare, "sh", "-c", inside, "-")


@contextmanager
def start_in_namespace(name: str, *words: str) -> Iterator[IO[str]]:
    """What a Python program in a namespace writes."""
    command = ("ip", "netns", "exec", name, sys.executable, *words)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        try:
            yield program.stdout
        finally:
            program.kill()


@contextmanager
def far(folder: Path) -> Iterator[tuple[str, Path]]:
    """The https URL of a server that is not on this machine, and the certificate to trust.

    Args:
        folder: for the certificate.
    """
    with network() as (name, there):
        file = certificate(there, folder / "far.pem")
        with start_in_namespace(name, herd.__file__, "1", "0", TOKEN, there, str(file)) as output:
            yield f"https://{there}:{output.readline().strip()}", file


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def certificate(address: str, file: Path) -> Path:
    """A certificate for an address, with its key, that is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "far")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    secret = key.private_bytes(
        encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(made.public_bytes(encoding) + secret)
    return file
