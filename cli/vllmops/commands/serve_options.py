"""The options of ``vllmops serve``, by the panels of its help."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from .. import demo
from ..model.environment import LARGEST_MESSAGE, CarrierFormat
from ..support.numbers import MOST
from . import serve_config
from .options import (
    complete_patch_id,
    make_admin_token_option,
    make_count_parser,
    normalize_host_port,
    parse_size,
    validate_duration,
)

CUDA = "--cuda-coredump"
CARRIERS = "Carriers and keys"
instance_option = partial(typer.Option, rich_help_panel="Instance")
responses_option = partial(typer.Option, rich_help_panel="Responses")
carrier_option = partial(typer.Option, rich_help_panel=CARRIERS)
socket_option = partial(typer.Option, rich_help_panel="WebSockets")
watch_option = partial(typer.Option, rich_help_panel="Watch")

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL [-- VLLM ARGUMENTS]", help="Directory of a model, or its Hub ID."
    ),
]
Detach = Annotated[
    bool, typer.Option("--detach", "-d", help="Return once the server is ready; it keeps running.")
]
Name = Annotated[
    str | None, typer.Option(help="Name of the instance [made from the model's name].")
]
Host = Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")]
Port = Annotated[
    int | None,
    typer.Option(
        parser=make_count_parser(1, 65535), help="Port to listen on [the first free one from 8000]."
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        is_eager=True,
        readable=False,
        callback=serve_config.load_config,
        help="Read options and vLLM arguments from this TOML file; the command line wins.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only print the exact command and environment.")
]
Toml = Annotated[
    bool, typer.Option("--toml", help="With --dry-run: print a file for --config instead.")
]
Demo = Annotated[
    demo.DemoKind | None,
    instance_option(
        metavar="KIND",
        help="Build and serve a tiny model with random weights: text, moe, vision or audio.",
    ),
]
Env = Annotated[
    list[str] | None,
    instance_option(metavar="K=V", help="Environment variable for vLLM; repeatable."),
]
NoPatch = Annotated[
    list[str] | None,
    instance_option(
        metavar="ID",
        help="Do not apply this patch, see `vllmops patches list`; repeatable.",
        autocompletion=complete_patch_id,
    ),
]
CudaCoredump = Annotated[
    Path | None,
    instance_option(
        CUDA,
        metavar="[DIR]",
        help="Let `vllmops stacks dump --cuda` dump the GPUs into this directory [cuda in"
        " VLLMOPS_HOME].",
    ),
]
Quiet = Annotated[
    bool, instance_option("--quiet", "-q", help="Do not show the log in the foreground.")
]
Store = Annotated[
    str | None,
    responses_option(
        metavar="URL",
        help="Where responses are stored: memory://, sqlite:///FILE, postgresql://, redis://,"
        " or none [a file of the instance].",
    ),
]
StoreMaxSize = Annotated[
    int | None,
    responses_option(
        parser=make_count_parser(1, MOST), help="Maximum number of stored responses [10000]."
    ),
]
StoreMaxPerKey = Annotated[
    int | None,
    responses_option(
        parser=make_count_parser(1, MOST),
        help="Maximum number of stored responses per API key [no limit].",
    ),
]
StoreTtl = Annotated[
    str | None,
    responses_option(
        parser=validate_duration,
        metavar="TIME",
        help="How long a response is stored after its last use, such as 12h [30d].",
    ),
]
Keyring = Annotated[
    Path | None,
    carrier_option(
        metavar="FILE",
        help="The keyring, or none [VLLMOPS_KEYRING, or keyring.json in VLLMOPS_HOME, which is"
        " created].",
    ),
]
Carrier = Annotated[
    CarrierFormat | None,
    carrier_option(
        metavar="FORMAT", help="Carrier format: v2 (encrypted) or signed-v1 (readable) [v2]."
    ),
]
CarrierTtl = Annotated[
    str | None,
    carrier_option(
        parser=validate_duration,
        metavar="TIME",
        help="How long a carrier is accepted, such as 12h [30d].",
    ),
]
CompactionPrompt = Annotated[
    Path | None,
    carrier_option(
        metavar="FILE",
        help="The prompt that asks the model for a summary when a conversation is compacted"
        " [vllmops' own].",
    ),
]


def parse_message_size(value: object) -> int:
    """A parser for the size of a message."""
    size = parse_size(value)
    if not 1 <= size <= LARGEST_MESSAGE:
        raise typer.BadParameter(f"it can be up to {LARGEST_MESSAGE >> 20}M, and not 0.")
    return size


WsMaxMessage = Annotated[
    int | None,
    socket_option(
        parser=parse_message_size,
        metavar="SIZE",
        help="Maximum size of a WebSocket message, and of the requests together that wait on a"
        " connection, up to 16M, such as 4M [16M].",
    ),
]
WsIdle = Annotated[
    str | None,
    socket_option(
        parser=validate_duration,
        metavar="TIME",
        help="Close a WebSocket on which nothing runs after this time without a message, such as"
        " 1h [15m].",
    ),
]
WsMaxRequests = Annotated[
    int | None,
    socket_option(
        parser=make_count_parser(1, MOST),
        help="Maximum number of requests that run or wait on a WebSocket [64].",
    ),
]
WsMaxConnections = Annotated[
    int | None,
    socket_option(
        parser=make_count_parser(1, MOST),
        help="Maximum number of open WebSockets per API server [2000].",
    ),
]
AdminToken = Annotated[Path | None, make_admin_token_option(CARRIERS)]
Watch = Annotated[
    bool, watch_option("--watch", help="Also run `vllmops watch`; it writes to the server's log.")
]
WatchExec = Annotated[str | None, watch_option(metavar="CMD", help="Watch with --exec CMD.")]
WatchWebhook = Annotated[str | None, watch_option(metavar="URL", help="Watch with --webhook URL.")]
WatchRepair = Annotated[bool, watch_option("--watch-repair", help="Watch with --repair.")]
WatchHeal = Annotated[bool, watch_option("--watch-heal", help="Watch with --heal.")]
ProbePort = Annotated[
    str | None,
    watch_option(
        parser=normalize_host_port,
        help="Watch with --listen [HOST:]PORT from the start, for probes.",
    ),
]
WatchRestart = Annotated[bool, watch_option("--watch-restart", help="Watch with --restart.")]
WatchRerun = Annotated[bool, watch_option("--watch-rerun", help="Watch with --rerun.")]
