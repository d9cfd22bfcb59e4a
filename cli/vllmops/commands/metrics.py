"""``vllmops metrics``: a server's state as metrics of Prometheus, with alert rules and boards."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from ..doctor.examine import look
from ..errors import VllmopsError
from ..host import gpu
from ..host.roles import Role
from ..instances.servers import Server, resolve
from ..metrics.alerts import Form, rules
from ..output import Json, JsonText, Result, Verbatim, say, typer_app
from ..protocol.place import key
from ..protocol.view import View
from ..rpc import agent, membership
from ..rpc.view import Viewer
from .options import Target, host_port, listening
from .several import remote

TIMEOUT_S = 2.0
app = typer_app()


class Board(StrEnum):
    OVERVIEW = "overview"
    INCIDENT = "incident"


Listen = Annotated[
    str | None,
    typer.Option(
        parser=listening,
        metavar="[HOST:]PORT",
        help="Serve them over HTTP until Ctrl-C; HOST is 127.0.0.1 by default.",
    ),
]
Alerts = Annotated[
    Form | None,
    typer.Option(help="Print alert rules: a file of Prometheus, or a PrometheusRule."),
]
BoardOption = Annotated[
    Board | None, typer.Option("--board", help="Print a dashboard for Grafana, as JSON.")
]


@app.command(epilog="Example: vllmops metrics -t demo --listen 9105")
@remote
def metrics(
    target: Target = None,
    listen: Listen = None,
    alerts: Alerts = None,
    board: BoardOption = None,
    json_: Json = False,
) -> Result:
    """Show a server's state as metrics of Prometheus.

    A server with the agent shows the same in its own /metrics.
    """
    if alerts:
        text = rules(alerts)
        return Result({"form": alerts, "rules": text}, lambda: [Verbatim(text.rstrip())])
    if board:
        from ..metrics.boards import board as made  # noqa: PLC0415 - of all commands, for this one

        dashboard = made(board)
        return Result(dashboard, lambda: [JsonText(json.dumps(dashboard, indent=1))])
    server = resolve(target)
    if listen:
        serve(server, target, *host_port(listen))
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415 - slow
    from prometheus_client.metrics_core import Metric  # noqa: PLC0415

    from ..metrics import families, state  # noqa: PLC0415

    samples = families.metrics(state.samples(viewing(lambda: server)()[0]))

    class Found:
        def collect(self) -> list[Metric]:
            return samples

    registry = CollectorRegistry()
    registry.register(Found())
    rows = [
        {"name": sample.name, "labels": sample.labels, "value": sample.value}
        for family in samples
        for sample in family.samples
    ]
    text = generate_latest(registry).decode()
    return Result({"metrics": rows}, lambda: [Verbatim(text.rstrip())])


def viewing(find: Callable[[], Server]) -> Callable[[], tuple[View, int]]:
    """What looks at a server, again and again; its processes may change meanwhile.

    Args:
        find: the server as it is now.
    """
    from ..metrics.state import differ  # noqa: PLC0415 - it imports prometheus_client

    processes: dict[tuple[str, int], Any] = {}
    began = time.monotonic()
    viewer = Viewer(lambda state: agent.reach(processes[key(state)], timeout_s=TIMEOUT_S), differ)

    def view() -> tuple[View, int]:
        server = find()
        processes.clear()
        processes.update({key(process): process for process in server.processes})
        seen = viewer.view(look(server, began))
        here = {membership.NODE: gpu.states()} if server.fleet is None else {}
        return replace(seen, gpus=here), len(server.of(Role.API))

    return view


def serve(server: Server, target: str | None, host: str, port: int) -> None:
    """Serve the metrics until Ctrl-C.

    Raises:
        VllmopsError: ``metrics.listen``.
    """
    from prometheus_client import CollectorRegistry  # noqa: PLC0415 - slow

    from ..metrics.gathering import Gathering  # noqa: PLC0415
    from ..metrics.listener import listener  # noqa: PLC0415

    registry = CollectorRegistry()
    # By its name an instance is found also where others run later on, and when its pids are new.
    gathering = Gathering(viewing(lambda: resolve(server.name or target)), say)
    registry.register(gathering)
    gathering.collect()
    try:
        listening_ = listener(host, port, registry)
    except OSError as error:
        raise VllmopsError(
            "metrics.listen",
            f"{host}:{port} can't be listened on: {error.strerror or error}",
            "choose another port, or an address of this machine",
        ) from error
    say(f"the metrics of {server.label} are on http://{host}:{port}/metrics")
    listening_.serve_forever()
