"""The alert rules, in the forms that Prometheus and its operator read."""

from __future__ import annotations

from enum import StrEnum
from importlib.resources import files
from typing import Final

OBJECT: Final = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: vllmops
spec:
"""


class AlertFormat(StrEnum):
    PROMETHEUS = "prometheus"
    KUBERNETES = "kubernetes"


def render_alert_rules(form: AlertFormat) -> str:
    """The alert rules, as a file of Prometheus or as an object of its operator."""
    text = files("vllmops.metrics").joinpath("alerts.yml").read_text("utf-8")
    if form is AlertFormat.PROMETHEUS:
        return text
    return OBJECT + "".join(
        f"  {line}" if line.strip() else line for line in text.splitlines(keepends=True)
    )
