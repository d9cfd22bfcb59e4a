"""``vllmops keys``: the keyring, key by key."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from .. import output
from ..errors import Exit, VllmopsError
from ..files import read
from ..keys import file
from ..keys.ring import Key, Ring, Status, fresh, from_hex
from ..output import Result, Verbatim, command, confirm
from . import keygen
from .keygen import Force, Format, Out
from .keyring import Keyring, Kid, Overlap, result, ring_path, said
from .push import push
from .rotate import after, not_loaded, period, rotate, status
from .verify import verify

app = output.typer_app("The keys that seal what clients carry.")


@app.callback()
def keys() -> None:
    """The keys that seal what clients carry."""


@app.command("list", epilog="Example: vllmops keys list --json")
@command
def list_(*, keyring: Keyring = None, json_: output.Json = False) -> Result:
    """List the keys, without their secrets.

    The `primary` seals. It, `next` and `verify-only` open what they have
    sealed; a `revoked` key opens nothing.
    """
    source = file.source(os.environ, keyring)
    return result(source.load(), str(source))


@app.command(epilog="Example: vllmops keys add")
@command
def add(*, keyring: Keyring = None, json_: output.Json = False) -> Result:
    """Add a fresh key; nobody gets to see it.

    It is `next`: servers take it, and none seals with it before it is
    promoted. The first of a keyring is its primary.
    """
    path = ring_path(keyring)
    key = Key.of(fresh(), Status.NEXT, time.time())
    ring = file.change(path, lambda ring: ring.add(first(ring, key)), create=True)
    if len(ring.keys) > 1:
        said(f"vllmops keys rotate promotes {key.kid} once every server has it", quiet=json_)
    return result(ring, str(path), {"kid": key.kid})


@app.command(epilog="Example: vllmops keys promote 3f9a1c20")
@command
def promote(
    kid: Kid,
    *,
    overlap: Overlap = None,
    force: Annotated[
        bool, typer.Option("--force", help="Though a server has not loaded it, or does not tell.")
    ] = False,
    keyring: Keyring = None,
    json_: output.Json = False,
) -> Result:
    """Have a key seal from now on; the primary so far opens what it sealed.

    Refused while a running server has not loaded it. A key that is
    verify-only can be gone back to.
    """
    path = ring_path(keyring)
    seconds = period(overlap, path).seconds
    file.load(path).promote(kid, time.time(), seconds)
    if not force and (why := not_loaded(path, kid)):
        raise VllmopsError(
            "keys.not-loaded",
            f"{kid} would seal what others can't open yet: {'; '.join(why)}",
            "try again in some seconds: servers load within 2 s; vllmops keys status shows which",
        )
    ring = file.change(path, lambda ring: ring.promote(kid, time.time(), seconds))
    return result(ring, str(path), *after(path, ring))


@app.command(epilog="Example: vllmops keys retire 3f9a1c20")
@command
def retire(
    kid: Kid,
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Though conversations that it sealed may go on.")
    ] = False,
    keyring: Keyring = None,
    json_: output.Json = False,
) -> Result:
    """Take a key out of the keyring for good, once its overlap is over."""
    path = ring_path(keyring)
    ring = file.change(path, lambda ring: ring.retire(kid, time.time(), force=force))
    return result(ring, str(path), *after(path, ring))


@app.command(epilog="Example: vllmops keys revoke 3f9a1c20 --yes")
@command
def revoke(
    kid: Kid,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    keyring: Keyring = None,
    json_: output.Json = False,
) -> Result:
    """Refuse whatever a key has sealed, at once: for a key that got out.

    Conversations that it sealed can't go on. In the place of a primary
    comes the next key, or a fresh one.
    """
    path = ring_path(keyring)
    spare = Key.of(fresh(), Status.NEXT, time.time())
    breaks = harm(file.load(path), kid)
    if not yes:
        confirm(f"{breaks} Revoke {kid}?", f"vllmops keys revoke {kid} --yes")
    ring = file.change(path, lambda ring: ring.revoke(kid, spare))
    more, notes = after(path, ring)
    return result(ring, str(path), {"kid": kid, "breaks": breaks, **more}, [breaks, *notes])


def harm(ring: Ring, kid: str) -> str:
    """What revoking a key breaks, in a sentence.

    Raises:
        VllmopsError: ``keys.unknown``.
    """
    match ring.get(kid).status:
        case Status.PRIMARY:
            heir = (
                f"{ring.next.kid} takes its place" if ring.next else "a fresh key takes its place"
            )
            return (
                f"Every conversation that clients carry and that was sealed since {kid} became "
                f"primary is refused from now on; {heir}, which servers that have not "
                "loaded it refuse for up to 2 s."
            )
        case Status.VERIFY_ONLY:
            return (
                f"Conversations that {kid} sealed before it was replaced are refused from now on."
            )
        case Status.NEXT:
            return f"Nothing breaks: {kid} has sealed nothing yet."
        case _:
            return f"Nothing changes: {kid} was revoked before."


@app.command("import", epilog="Example: vllmops keys import - < key.hex")
@command
def import_(
    source: Annotated[
        Path,
        typer.Argument(
            readable=False, metavar="FILE", help="What keygen or export wrote; - reads stdin."
        ),
    ],
    *,
    verify_only: Annotated[
        bool,
        typer.Option("--verify-only", help="A key that opens what it sealed elsewhere, no more."),
    ] = False,
    keyring: Keyring = None,
    json_: output.Json = False,
) -> Result:
    """Take keys in: hex, a line of an environment file, or another keyring.

    A single key comes in as `next`, the first of a keyring as its primary.
    Of a keyring's keys those that are known already change as far as the
    other one is further on in a rotation or a revocation.
    """
    path = ring_path(keyring)
    other = parsed(source, verify_only=verify_only)

    def merged(ring: Ring) -> Ring:
        if isinstance(other, Ring):
            return ring.merge(other)
        return ring.add(first(ring, other) if other.status is Status.NEXT else other)

    ring = file.change(path, merged, create=True)
    return result(ring, str(path), *after(path, ring))


def first(ring: Ring, key: Key) -> Key:
    """A key, as the primary where it is a ring's first."""
    return key if ring.keys else msgspec.structs.replace(key, status=Status.PRIMARY)


def parsed(source: Path, *, verify_only: bool) -> Key | Ring:
    """A key or a ring from a file or from stdin.

    Raises:
        VllmopsError: as `files.read` does, or whatever is wrong with what is there.
    """
    content = read(source, file.MOST_BYTES)
    if content.lstrip().startswith(b"{"):
        return file.decode(content, source)
    text = content.decode(errors="replace").strip()
    text = text.removeprefix("export ").removeprefix(f"{file.SIGNING_KEY}=").strip("\"'")
    secret = from_hex(text, "what was given")
    return Key.of(secret, Status.VERIFY_ONLY if verify_only else Status.NEXT, time.time())


@app.command(epilog="Example: vllmops keys export --out /media/usb/keyring.json")
@command
def export(
    kid: Annotated[
        str | None,
        typer.Argument(metavar="[KID]", help="One key, rather than all; hex and env: the primary."),
    ] = None,
    *,
    format_: Annotated[
        Format, typer.Option("--format", help="json and k8s-secret hold a keyring.")
    ] = Format.JSON,
    out: Out = None,
    force: Force = False,
    reveal: Annotated[
        bool, typer.Option("--reveal", help="Print it, secrets and all, for lack of an --out.")
    ] = False,
    keyring: Keyring = None,
    json_: output.Json = False,
) -> Result:
    """Write keys with their secrets, for servers that don't share the file."""
    if not out and not reveal:
        raise VllmopsError(
            "usage",
            "it would print secrets",
            "--out FILE, or --reveal to print them all the same",
            exit_code=Exit.USAGE,
        )
    ring = file.source(os.environ, keyring).load()
    if kid:
        ring = Ring(keys=(ring.get(kid),))
    match format_:
        case Format.JSON:
            text = keygen.whole(ring)
        case Format.KUBERNETES:
            text = keygen.manifest("keyring.json", keygen.whole(ring))
        case _:
            text = keygen.spelt(ring.keys[0] if kid else ring.sealing(), format_)
    if out:
        keygen.save(out, text, force=force)
        said(f"{len(ring.keys)} keys are in {out}", quiet=json_)
    data = {"path": str(out) if out else None, "keys": [key.told() for key in ring.keys]}
    return Result(data if out else {**data, "text": text}, lambda: () if out else [Verbatim(text)])


app.command(epilog="Example: vllmops keys push -t https://b --admin-token b.key")(push)
app.command(epilog="Example: vllmops keys rotate --dry-run")(rotate)
app.command(epilog="Example: vllmops keys status")(status)
app.command(epilog="Example: vllmops keys verify - < carrier.txt")(verify)
