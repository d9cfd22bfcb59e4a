"""The options of ``vllmops serve``, by the panels of its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import demo as demos
from ..numbers import MOST
from ..store import settings
from . import serve_config
from .options import admin_token_option, count, listening, patch_ids, size_, time_

CUDA = "--cuda-coredump"
INSTANCE = "Instance"
RESPONSES = "Responses"
CARRIERS = "Carriers and keys"
WEBSOCKETS = "WebSockets"
WATCH = "Watch"

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL [-- VLLM ARGUMENTS]", help="Directory of a model, or its Hub ID."
    ),
]
Detach = Annotated[
    bool,
    typer.Option("--detach", "-d", help="Return once the server is ready; it keeps running."),
]
Name = Annotated[
    str | None, typer.Option(help="Name of the instance [made from the model's name].")
]
Host = Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")]
Port = Annotated[
    int | None,
    typer.Option(parser=count(1, 65535), help="Port to listen on [the first free one from 8000]."),
]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        is_eager=True,
        readable=False,
        callback=serve_config.load,
        help="Read options and vLLM arguments from this TOML file; the command line wins.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Only print the exact command and environment."),
]
Toml = Annotated[
    bool,
    typer.Option("--toml", help="With --dry-run: print a file for --config instead."),
]
Demo = Annotated[
    demos.Kind | None,
    typer.Option(
        metavar="KIND",
        help="Build and serve a tiny model with random weights: text, moe, vision or audio.",
        rich_help_panel=INSTANCE,
    ),
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        metavar="K=V",
        help="Environment variable for vLLM; repeatable.",
        rich_help_panel=INSTANCE,
    ),
]
NoPatch = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID",
        help="Do not apply this patch, see `vllmops patches list`; repeatable.",
        autocompletion=patch_ids,
        rich_help_panel=INSTANCE,
    ),
]
CudaCoredump = Annotated[
    Path | None,
    typer.Option(
        CUDA,
        metavar="[DIR]",
        help="Let `vllmops stacks dump --cuda` dump the GPUs into this directory [cuda in"
        " VLLMOPS_HOME].",
        show_default=False,
        rich_help_panel=INSTANCE,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="Do not show the log in the foreground.",
        rich_help_panel=INSTANCE,
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Where responses are stored: memory://, sqlite:///FILE, postgresql://, redis://,"
        " or none [a file of the instance].",
        rich_help_panel=RESPONSES,
    ),
]
StoreMaxSize = Annotated[
    int | None,
    typer.Option(
        parser=count(1, MOST),
        help="Maximum number of stored responses [10000].",
        rich_help_panel=RESPONSES,
    ),
]
StoreMaxPerKey = Annotated[
    int | None,
    typer.Option(
        parser=count(1, MOST),
        help="Maximum number of stored responses per API key [no limit].",
        rich_help_panel=RESPONSES,
    ),
]
StoreTtl = Annotated[
    str | None,
    typer.Option(
        parser=time_,
        metavar="TIME",
        help="How long a response is stored after its last use, such as 12h [30d].",
        rich_help_panel=RESPONSES,
    ),
]
Keyring = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The keyring, or none [VLLMOPS_KEYRING, or keyring.json in VLLMOPS_HOME, which is"
        " created].",
        show_default=False,
        rich_help_panel=CARRIERS,
    ),
]
Carrier = Annotated[
    settings.Format | None,
    typer.Option(
        metavar="FORMAT",
        help="Carrier format: v2 (encrypted) or signed-v1 (readable) [v2].",
        rich_help_panel=CARRIERS,
    ),
]
CarrierTtl = Annotated[
    str | None,
    typer.Option(
        parser=time_,
        metavar="TIME",
        help="How long a carrier is accepted, such as 12h [30d].",
        rich_help_panel=CARRIERS,
    ),
]
CompactionPrompt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The prompt that asks the model for a summary when a conversation is compacted"
        " [vllmops' own].",
        show_default=False,
        rich_help_panel=CARRIERS,
    ),
]
WsMaxMessage = Annotated[
    int | None,
    typer.Option(
        parser=size_,
        metavar="SIZE",
        help="Maximum size of a WebSocket message, and of the requests together that wait on a"
        " connection, up to 16M, such as 4M [16M].",
        rich_help_panel=WEBSOCKETS,
    ),
]
WsIdle = Annotated[
    str | None,
    typer.Option(
        parser=time_,
        metavar="TIME",
        help="Close a WebSocket on which nothing runs after this time without a message, such as"
        " 1h [15m].",
        rich_help_panel=WEBSOCKETS,
    ),
]
WsMaxRequests = Annotated[
    int | None,
    typer.Option(
        parser=count(1, MOST),
        help="Maximum number of requests that run or wait on a WebSocket [64].",
        rich_help_panel=WEBSOCKETS,
    ),
]
WsMaxConnections = Annotated[
    int | None,
    typer.Option(
        parser=count(1, MOST),
        help="Maximum number of open WebSockets per API server [2000].",
        rich_help_panel=WEBSOCKETS,
    ),
]
AdminToken = Annotated[Path | None, admin_token_option(CARRIERS)]
Watch = Annotated[
    bool,
    typer.Option(
        "--watch",
        help="Also run `vllmops watch`; it writes to the server's log.",
        rich_help_panel=WATCH,
    ),
]
WatchExec = Annotated[
    str | None,
    typer.Option(metavar="CMD", help="Watch with --exec CMD.", rich_help_panel=WATCH),
]
WatchWebhook = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Watch with --webhook URL.", rich_help_panel=WATCH),
]
WatchRepair = Annotated[
    bool, typer.Option("--watch-repair", help="Watch with --repair.", rich_help_panel=WATCH)
]
WatchHeal = Annotated[
    bool, typer.Option("--watch-heal", help="Watch with --heal.", rich_help_panel=WATCH)
]
ProbePort = Annotated[
    str | None,
    typer.Option(
        parser=listening,
        help="Watch with --listen [HOST:]PORT from the start, for probes.",
        show_default=False,
        rich_help_panel=WATCH,
    ),
]
WatchRestart = Annotated[
    bool, typer.Option("--watch-restart", help="Watch with --restart.", rich_help_panel=WATCH)
]
WatchRerun = Annotated[
    bool, typer.Option("--watch-rerun", help="Watch with --rerun.", rich_help_panel=WATCH)
]
