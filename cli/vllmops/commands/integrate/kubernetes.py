"""``vllmops integrate kubernetes``: patches for a Deployment."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from vllmops_responses.keys import keyring_file

from ...metrics.alerts import AlertFormat, render_alert_rules
from ...support.errors import VllmopsError
from ...support.output import Json, Result, VerbatimText, print_result
from ..options import make_count_parser

FOLDER = Path(__file__).parent
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
LONGEST = 230  # with the name of the Secret it has 253 at most
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")
OTHERS = "Other objects"
SLACK_S = 60  # to end what a drain has left


def validate_container_name(value: str) -> str:
    """A callback for the name of a container."""
    if not NAME.fullmatch(value):
        raise typer.BadParameter(f"{value!r} is not a name in Kubernetes.")
    return value


def validate_deployment_name(value: str) -> str:
    """A callback for the name of a Deployment, whose parts are such names."""
    if len(value) > LONGEST:
        raise typer.BadParameter(f"it has more than {LONGEST} characters.")
    for part in value.split("."):
        validate_container_name(part)
    return value


def validate_image_name(value: str | None) -> str | None:
    """A callback for the name of an image."""
    if value is not None and not IMAGE.fullmatch(value):
        raise typer.BadParameter(f"{value!r} is not the name of an image.")
    return value


@print_result
def kubernetes(
    deployment: Annotated[
        str, typer.Option(callback=validate_deployment_name, help="Name of the Deployment.")
    ] = "vllm",
    container: Annotated[
        str,
        typer.Option(
            callback=validate_container_name, help="Its container that runs vllmops serve."
        ),
    ] = "vllm",
    probe_port: Annotated[
        int,
        typer.Option(parser=make_count_parser(1, 65535), help="The port of serve --probe-port."),
    ] = 8081,
    drain: Annotated[
        int,
        typer.Option(parser=make_count_parser(1, 86_400), help="Seconds for requests in flight."),
    ] = 120,
    debug: Annotated[
        str | None,
        typer.Option(
            callback=validate_image_name,
            metavar="IMAGE",
            help="Add a container with vllmops that may look into the server.",
        ),
    ] = None,
    keyring: Annotated[
        bool, typer.Option("--keyring", help="Mount the Secret of --secret as the keyring.")
    ] = False,
    secret: Annotated[
        Path | None,
        typer.Option(
            metavar="KEYRING",
            readable=False,
            help="Print this Secret alone, with the keys of this file.",
            rich_help_panel=OTHERS,
        ),
    ] = None,
    alerts: Annotated[
        bool,
        typer.Option(
            "--alerts",
            help="Print the PrometheusRule with the alerts alone.",
            rich_help_panel=OTHERS,
        ),
    ] = False,
    json_: Json = False,
) -> Result:
    """Print patches for a Deployment: probes, a drain before the end, keys, a debug container.

    The container runs `vllmops serve MODEL --host 0.0.0.0 --probe-port 0.0.0.0:8081`.
    Apply the patch with `kubectl patch deployment NAME --patch-file patch.yaml`.
    """
    given: dict[str, object] = {
        "deployment": deployment,
        "container": container,
        "port": probe_port,
        "drain": drain,
        "grace": drain + SLACK_S,
        "image": debug,
    }
    if alerts and secret is not None:
        raise VllmopsError("usage", "--alerts and --secret print an object each: give one")
    if alerts:
        text = render_alert_rules(AlertFormat.KUBERNETES)
        return Result({"manifest": text}, lambda: [VerbatimText(text.rstrip())])
    if secret is not None:
        given["keyring"] = base64.b64encode(
            keyring_file.encode_keyring(keyring_file.load_keyring(secret))
        ).decode()
        parts = ["secret"]
    else:
        wanted = {"mount": keyring, "debug": debug, "volume": keyring}
        parts = ["deployment", *(part for part, wants in wanted.items() if wants)]
    text = "".join(
        Template((FOLDER / f"{part}.yaml").read_text("utf-8")).substitute(given) for part in parts
    )
    return Result({"manifest": text}, lambda: [VerbatimText(text.rstrip())])
