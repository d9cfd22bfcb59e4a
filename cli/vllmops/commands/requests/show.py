"""``vllmops requests show``: everything that is known of one request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ...errors import Exit, VllmopsError
from ...host.roles import Role
from ...instances.servers import Server, resolve
from ...output import Json, Result, Verbatim, span, styled
from ...protocol.requests import Prompt
from ...requests.listing import Row
from ...rpc import agent
from ..options import Target
from ..several import remote
from .selection import STUCK_S, StuckAfter, gathered, named, request_ids

if TYPE_CHECKING:
    from rich.console import RenderableType

SECONDS = {"age_s": "age", "still_s": "no token for"}
LABELS = {
    "state": "state",
    "waiting_reason": "waits for",
    "stuck": "stuck",
    **SECONDS,
    "prompt_tokens": "prompt tokens",
    "output_tokens": "output tokens",
    "kv_blocks": "KV blocks",
    "cache_pins": "cache pins",
    "preemptions": "preemptions",
    "priority": "priority",
    "owner": "owner",
    "route": "route",
    "lora": "LoRA adapter",
    "api": "API server",
    "engine": "engine",
    "ranks": "ranks",
}


@remote
def show(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="As requests list shows it, or vLLM's own.",
            autocompletion=request_ids,
        ),
    ],
    *,
    target: Target = None,
    stuck_after: StuckAfter = STUCK_S,
    reveal: Annotated[
        bool, typer.Option("--reveal", help="Also show the prompt: it is a user's text.")
    ] = False,
    json_: Json = False,
) -> Result:
    """Show everything that is known of one request.

    A request with several choices (n) has a part for each. The owner is a
    hash of the API key.
    """
    server = resolve(target)
    rows = named(gathered(server, stuck_after, quiet=json_), server, request_id)
    prompts = [revealed(server, row) for row in rows] if reveal else []
    data: dict[str, Any] = {"server": server.label, "requests": rows}
    if reveal:
        data["prompts"] = prompts
    return Result(data, lambda: list(text(rows, prompts)))


def revealed(server: Server, row: Row) -> Prompt:
    """The prompt of a request.

    Raises:
        VllmopsError: ``requests.no-prompt``, and as `rpc.agent.Agent` does.
    """
    if server.fleet:
        raise VllmopsError(
            "requests.no-prompt",
            "prompts are shown on the server's own machine only",
            "leave --reveal out",
            exit_code=Exit.USAGE,
        )
    for process in server.of(Role.API):
        if process.pid == row.api and (prompt := agent.reach(process).prompt(row.id)).known:
            return prompt
    raise VllmopsError(
        "requests.no-prompt",
        f"no API server of {server.label} has the prompt of {row.http_id or row.id or 'it'}",
        f"vllmops requests show {row.id} -t {server.label}",
    )


def text(rows: list[Row], prompts: list[Prompt]) -> Iterator[RenderableType]:
    """The rows for a person, a line for each figure that is known."""
    for number, row in enumerate(rows):
        if number:
            yield ""
        yield styled(row.http_id or row.id, "bold")
        if row.http_id and row.id:
            yield f"  vLLM's id: {row.id}"
        fields = msgspec.structs.asdict(row)
        for name, label in LABELS.items():
            if (value := fields[name]) not in {None, ""}:
                yield f"  {label}: {span(value) if name in SECONDS else value}"
        if number < len(prompts):
            prompt = prompts[number]
            yield "  prompt:"
            yield Verbatim(prompt.text or f"tokens {' '.join(map(str, prompt.tokens))}")
