"""``vllmops bundle``: everything about a server in one file, without secrets, for a bug report."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ..bundle import bundle_file
from ..bundle.parts import COLLECT_ENV_S, TIMEOUT_S, collect_contents
from ..model.bundle_index import BundleIndex
from ..model.findings import Finding
from ..model.ranks import format_role_and_ranks
from ..servers.discovery import Server, list_servers, resolve_server
from ..support import files, output
from ..support.errors import VllmopsError
from ..support.output import Json, Progress, Result, format_bytes, make_table, make_typer_app
from ..support.streams import make_stop_event
from .multi_target import allow_remote_target
from .options import Target, make_seconds_parser, validate_output_path

if TYPE_CHECKING:
    from rich.console import RenderableType

app = make_typer_app()


@app.command(epilog="Example: vllmops bundle -t demo -o hang.tar.gz")
@allow_remote_target
def bundle(
    *,
    target: Target = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            readable=False,
            callback=validate_output_path,
            help="The file, or a folder for it [a name with server and time, in this directory].",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            parser=make_seconds_parser(1),
            help="Seconds to capture everything. vLLM's collect_env, which runs beside it, has "
            f"{COLLECT_ENV_S:g} at least. Redaction, which follows, has {bundle_file.REDACT_S:g}.",
        ),
    ] = TIMEOUT_S,
    no_redact: Annotated[
        bool, typer.Option("--no-redact", help="Do not remove keys, tokens and prompts.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file if it exists, without asking.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be captured.")
    ] = False,
    json_: Json = False,
) -> Result:
    """Write evidence for a bug report to a file, without secrets.

    It holds stacks (three samples), caches, metrics, log, configuration, versions
    and more, and says what could not be captured. Nothing changes; each process
    stops for some milliseconds. Keys, tokens, prompts and most environment
    variables are redacted. Review the file before you share it. Ctrl-C ends the
    capture early and keeps what is there. doctor, stacks explain and cache
    inspect read the file. An instance that has ended still has a log.
    """
    server = find_server(target)
    if dry_run:
        return preview_bundle(server, redact=not no_redact)
    path = choose_bundle_path(out, server.label)
    replace = force
    if path.is_file() and not force:
        output.require_confirmation(
            f"{path} exists. Replace it?", "vllmops bundle --force, or another -o FILE"
        )
        replace = True
    # Not an exception: what was captured must be written, however often Ctrl-C is pressed.
    stop = make_stop_event(signal.SIGINT)
    with Progress(time.time(), quiet=json_) as progress:
        contents = collect_contents(
            server,
            timeout_s=timeout,
            collect_env_s=max(timeout, COLLECT_ENV_S),
            report_progress=progress.update,
            stop=stop,
        )
        progress.update("writing the file")
        path, index = bundle_file.write_bundle(
            contents,
            path,
            redact=not no_redact,
            redact_s=max(timeout, bundle_file.REDACT_S),
            overwrite=replace,
        )
    findings = contents.findings
    data = {
        "file": str(path),
        "bytes": path.stat().st_size,
        **msgspec.to_builtins(index),
        "findings": findings,
    }
    if not contents.interrupted:
        return Result(data, lambda: list(render_index(path, index, findings)))
    if not json_:
        output.print_parts(*render_index(path, index, findings))
    raise VllmopsError(
        "interrupted",
        f"interrupted; what was captured until then is in {path}",
        data=data,
    )


def find_server(target: str | None) -> Server:
    """The server, also an instance that has ended: it has left a log."""
    named = target or os.environ.get("VLLMOPS_TARGET")
    if named and "://" not in named:
        over = [
            server for server in list_servers() if server.name == named and not server.processes
        ]
        if over:
            return over[0]
    return resolve_server(target)


def choose_bundle_path(output_path: Path | None, label: str) -> Path:
    """Where the bundle is written; checked before anything is captured.

    Raises:
        VllmopsError: ``bundle.not-written``.
    """
    name = bundle_file.make_bundle_name(label, time.time())
    path = output_path or Path()
    try:
        path = path / name if path.is_dir() else path
        files.require_writable(path)
    except OSError as error:
        raise bundle_file.make_not_written_error(path.absolute(), error) from error
    return path


def preview_bundle(server: Server, *, redact: bool) -> Result:
    """What would be captured."""
    parts = dict(bundle_file.PARTS)
    if not server.processes:
        alive = {"stacks.jsonl", "caches.json", "metrics.txt"}
        parts = {name: about for name, about in parts.items() if name not in alive}
    if not server.record:
        del parts["supervisor.txt"]
    if server.fleet:
        there = {"log.txt", "configuration.json", "versions.json", "collect_env.txt"}
        parts = {name: about for name, about in parts.items() if name not in there}
    for process in () if server.fleet else server.processes:
        name = format_role_and_ranks(process.role, process.place)
        parts[f"proc/{process.pid}.txt"] = f"{name}: {bundle_file.ABOUT_PROC}"
    data = {
        "server": server.label,
        "parts": [{"name": name, "about": about} for name, about in parts.items()],
        "redacted": redact,
    }

    def render_parts() -> list[RenderableType]:
        listed = make_table("part", "what")
        for name, about in parts.items():
            listed.add_row(name, about)
        return [listed]

    return Result(data, render_parts)


def render_index(
    path: Path, index: BundleIndex, findings: Sequence[Finding] | None
) -> Iterator[RenderableType]:
    """The index for a person."""
    listed = make_table("part", "size", "took", right_columns=("size", "took"))
    for part in index.parts:
        name = f"{part.name} {part.process}".rstrip()
        listed.add_row(name, format_bytes(part.bytes), f"{part.seconds:.1f} s")
    yield listed
    yield ""
    if findings is not None:
        codes = ", ".join(dict.fromkeys(finding.code for finding in findings))
        yield output.style_text(f"doctor: {codes or 'no findings'}", "bold" if findings else "")
    for missing in index.missing:
        yield output.style_text(f"not captured: {missing.name}: {missing.reason}", "yellow")
    redactions = ", ".join(f"{count} x {kind}" for kind, count in index.redactions.items())
    if index.redacted:
        yield f"redacted: {redactions or 'nothing: no secrets were found'}"
    yield output.style_text(
        f"{index.note[0].upper()}{index.note[1:]}.", "bold" if index.redacted else "bold red"
    )
    yield f"{path}: {format_bytes(path.stat().st_size)}, {index.seconds:.1f} s"
