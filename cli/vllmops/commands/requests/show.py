"""``vllmops requests show``: everything that is known of one request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ...collect.agents import agent_client
from ...model.requests import PromptAnswer
from ...model.roles import Role
from ...observe.requests.listing import InFlightRequest
from ...servers.discovery import Server, resolve_server
from ...support.errors import ExitCode, VllmopsError
from ...support.output import Json, Result, VerbatimText, format_duration, style_text
from ..multi_target import allow_remote_target
from ..options import Target
from .request_options import (
    STUCK_S,
    StuckAfter,
    collect_requests,
    complete_request_id,
    require_requests,
)

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


@allow_remote_target
def show(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="As requests list shows it, or vLLM's own.",
            autocompletion=complete_request_id,
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
    server = resolve_server(target)
    rows = require_requests(collect_requests(server, stuck_after, quiet=json_), server, request_id)
    prompts = [fetch_prompt(server, row) for row in rows] if reveal else []
    data: dict[str, Any] = {"server": server.label, "requests": rows}
    if reveal:
        data["prompts"] = prompts
    return Result(data, lambda: list(render_requests(rows, prompts)))


def fetch_prompt(server: Server, row: InFlightRequest) -> PromptAnswer:
    """The prompt of a request.

    Raises:
        VllmopsError: ``requests.no-prompt``, and as `collect.agents.agent_client.Agent` does.
    """
    if server.fleet:
        raise VllmopsError(
            "requests.no-prompt",
            "prompts are shown on the server's own machine only",
            "leave --reveal out",
            exit_code=ExitCode.USAGE,
        )
    for process in server.select_processes(Role.API):
        if (
            process.pid == row.api
            and (prompt := agent_client.open_agent(process).fetch_prompt(row.id)).is_known
        ):
            return prompt
    raise VllmopsError(
        "requests.no-prompt",
        f"no API server of {server.label} has the prompt of {row.http_id or row.id or 'it'}",
        f"vllmops requests show {row.id} -t {server.label}",
    )


def render_requests(
    rows: list[InFlightRequest], prompts: list[PromptAnswer]
) -> Iterator[RenderableType]:
    """The rows for a person, a line for each figure that is known."""
    for number, row in enumerate(rows):
        if number:
            yield ""
        yield style_text(row.http_id or row.id, "bold")
        if row.http_id and row.id:
            yield f"  vLLM's id: {row.id}"
        fields = msgspec.structs.asdict(row)
        for name, label in LABELS.items():
            if (value := fields[name]) not in {None, ""}:
                yield f"  {label}: {format_duration(value) if name in SECONDS else value}"
        if number < len(prompts):
            prompt = prompts[number]
            yield "  prompt:"
            yield VerbatimText(prompt.text or f"tokens {' '.join(map(str, prompt.tokens))}")
