"""``vllmops metrics``: a server's state as metrics of Prometheus, with alert rules and boards."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from ..collect.agents import agent_client, membership
from ..collect.machine import gpu
from ..metrics.alerts import AlertFormat, render_alert_rules
from ..metrics.snapshot_collector import MetricsCollector
from ..model.ranks import make_process_key
from ..model.roles import Role
from ..model.server_metrics import MetricsSnapshot
from ..observe.server_snapshot import observe_server
from ..servers.discovery import Server, resolve_server
from ..support.errors import VllmopsError
from ..support.output import Json, JsonText, Result, VerbatimText, make_typer_app, print_to_stderr
from .multi_target import allow_remote_target
from .options import Target, normalize_host_port, parse_host_port

TIMEOUT_S = 2.0
app = make_typer_app()


class Dashboard(StrEnum):
    OVERVIEW = "overview"
    INCIDENT = "incident"


Listen = Annotated[
    str | None,
    typer.Option(
        parser=normalize_host_port,
        metavar="[HOST:]PORT",
        help="Serve them over HTTP until Ctrl-C; HOST is 127.0.0.1 by default.",
    ),
]
Alerts = Annotated[
    AlertFormat | None,
    typer.Option(help="Print alert rules: a file of Prometheus, or a PrometheusRule."),
]
BoardOption = Annotated[
    Dashboard | None, typer.Option("--board", help="Print a dashboard for Grafana, as JSON.")
]


@app.command(epilog="Example: vllmops metrics -t demo --listen 9105")
@allow_remote_target
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
        text = render_alert_rules(alerts)
        return Result({"form": alerts, "rules": text}, lambda: [VerbatimText(text.rstrip())])
    if board:
        from ..metrics.grafana_dashboards import build_dashboard as made  # noqa: PLC0415 - of all commands, for this one

        dashboard = made(board)
        return Result(dashboard, lambda: [JsonText(json.dumps(dashboard, indent=1))])
    server = resolve_server(target)
    if listen:
        serve_metrics(server, target, *parse_host_port(listen))
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415 - slow
    from prometheus_client.metrics_core import Metric  # noqa: PLC0415

    from ..metrics import metric_families  # noqa: PLC0415
    from ..metrics import metric_values as state  # noqa: PLC0415

    samples = metric_families.build_metrics(
        state.make_samples(make_view_function(lambda: server)()[0])
    )

    class SampleCollector:
        def collect(self) -> list[Metric]:
            return samples

    registry = CollectorRegistry()
    registry.register(SampleCollector())
    rows = [
        {"name": sample.name, "labels": sample.labels, "value": sample.value}
        for family in samples
        for sample in family.samples
    ]
    text = generate_latest(registry).decode()
    return Result({"metrics": rows}, lambda: [VerbatimText(text.rstrip())])


def make_view_function(find: Callable[[], Server]) -> Callable[[], tuple[MetricsSnapshot, int]]:
    """What looks at a server, again and again; its processes may change meanwhile.

    Args:
        find: the server as it is now.
    """
    from ..metrics.metric_values import has_differing_sides  # noqa: PLC0415 - it imports prometheus_client

    processes: dict[tuple[str, int], Any] = {}
    began = time.monotonic()
    viewer = MetricsCollector(
        lambda state: agent_client.open_agent(
            processes[make_process_key(state)], timeout_s=TIMEOUT_S
        ),
        has_differing_sides,
    )

    def take_view() -> tuple[MetricsSnapshot, int]:
        server = find()
        processes.clear()
        processes.update({make_process_key(process): process for process in server.processes})
        seen = viewer.collect_snapshot(observe_server(server, began))
        here = {membership.NODE: gpu.observe_gpus()} if server.fleet is None else {}
        return replace(seen, gpus=here), len(server.select_processes(Role.API))

    return take_view


def serve_metrics(server: Server, target: str | None, host: str, port: int) -> None:
    """Serve the metrics until Ctrl-C.

    Raises:
        VllmopsError: ``metrics.listen``.
    """
    from prometheus_client import CollectorRegistry  # noqa: PLC0415 - slow

    from ..metrics.collector import BackgroundCollector  # noqa: PLC0415
    from ..metrics.http_listener import make_metrics_server  # noqa: PLC0415

    registry = CollectorRegistry()
    # By its name an instance is found also where others run later on, and when its pids are new.
    gathering = BackgroundCollector(
        make_view_function(lambda: resolve_server(server.name or target)), print_to_stderr
    )
    registry.register(gathering)
    gathering.collect()
    try:
        listening_ = make_metrics_server(host, port, registry)
    except OSError as error:
        raise VllmopsError(
            "metrics.listen",
            f"{host}:{port} can't be listened on: {error.strerror or error}",
            "choose another port, or an address of this machine",
        ) from error
    print_to_stderr(f"the metrics of {server.label} are on http://{host}:{port}/metrics")
    listening_.serve_forever()
