"""Sends events as log records of OpenTelemetry, where its own variables name a collector."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from ..model.watch_events import WatchEvent
from ..support.errors import VllmopsError

if TYPE_CHECKING:
    from opentelemetry._logs import Logger

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_LOGS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
GRPC: Final = "grpc"  # vLLM's default for traces
EXPORTERS: Final = {
    GRPC: "opentelemetry.exporter.otlp.proto.grpc._log_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http._log_exporter",
}
LOST: Final = "events are not sent to OpenTelemetry's collector"
LOUD: Final = frozenset({"stalled", "failed", "trouble"})
# The other fields may hold ids of requests, paths and passwords in URLs.
SENT: Final = ("server", "model", "number", "seconds", "code", "subject", "victims", "findings")


def make_otlp_sender(environment: Mapping[str, str]) -> Callable[[WatchEvent], None] | None:
    """What sends events to a collector; None where the environment names none.

    Raises:
        VllmopsError: ``watch.otlp`` where OpenTelemetry is not installed, or can't do it.
    """
    off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if (
        off
        or environment.get("OTEL_LOGS_EXPORTER") == "none"
        or not find_first_value(environment, ENDPOINTS)
    ):
        return None
    protocol = find_first_value(environment, PROTOCOLS) or GRPC
    if protocol not in EXPORTERS:
        message = f"the protocol {protocol!r} is none of {', '.join(EXPORTERS)}"
        raise VllmopsError("watch.otlp", f"{LOST}: {message}")
    try:
        installed = importlib.util.find_spec(EXPORTERS[protocol])
    except ModuleNotFoundError:
        installed = None
    if not installed:
        hint = "pip install 'vllmops-cli[otel]'"
        raise VllmopsError("watch.otlp", f"{LOST}: OpenTelemetry is not installed", hint)
    return OtlpSender(EXPORTERS[protocol])


def find_first_value(environment: Mapping[str, str], names: Sequence[str]) -> str:
    """The value of the first variable that has one, empty if none has."""
    return next((value for name in names if (value := environment.get(name))), "")


class OtlpSender:
    """Sends each event as a log record; imports OpenTelemetry with the first.

    Args:
        module: has the exporter, which reads its endpoint, headers and certificates from the
            environment.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self.sent = False

    @cached_property
    def logger(self) -> Logger:
        from opentelemetry.sdk._logs import LoggerProvider  # noqa: PLC0415 - slow
        from opentelemetry.sdk._logs.export import (  # noqa: PLC0415
            LogRecordExportResult,
            SimpleLogRecordProcessor,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415

        # Its complaints go through `VllmopsError`.
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        logging.getLogger("opentelemetry").propagate = False
        exporter = importlib.import_module(self.module).OTLPLogExporter()
        export = exporter.export

        def export_and_note(batch: Any) -> Any:
            result = export(batch)
            self.sent = result is LogRecordExportResult.SUCCESS
            return result

        exporter.export = export_and_note
        named = "OTEL_SERVICE_NAME" in os.environ
        resource = Resource.create({} if named else {"service.name": "vllmops"})
        provider = LoggerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
        return provider.get_logger("vllmops")

    def __call__(self, event: WatchEvent) -> None:
        """Send it; tries again for 10 seconds, or what ``OTEL_EXPORTER_OTLP_TIMEOUT`` says.

        Raises:
            VllmopsError: ``watch.otlp``.
        """
        from opentelemetry._logs import SeverityNumber  # noqa: PLC0415 - slow

        level = SeverityNumber.WARN if event.event in LOUD else SeverityNumber.INFO
        values = {name: getattr(event, name) for name in SENT}
        self.sent = False
        self.logger.emit(
            timestamp=int(event.happened_at * 1e9),
            severity_number=level,
            severity_text=level.name,
            event_name=f"vllmops.{event.event}",
            body=event.title or event.event,
            attributes={f"vllmops.{name}": value for name, value in values.items() if value},
        )
        if not self.sent:
            raise VllmopsError(
                "watch.otlp", "the collector of OpenTelemetry did not accept the event"
            )
