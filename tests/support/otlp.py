"""A collector of OpenTelemetry over HTTP, which keeps what it gets as OTLP's own messages.

Not over gRPC, which breaks every later fork of the process that it runs in.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PROTOCOL = "http/protobuf"
TRACES, LOGS = "/v1/traces", "/v1/logs"


class Collector:
    """Listens on a port of its own, from its start to `stop`."""

    def __init__(self) -> None:
        self.traces: list[ExportTraceServiceRequest] = []
        self.logs: list[ExportLogsServiceRequest] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == TRACES:
                    collector.traces.append(ExportTraceServiceRequest.FromString(content))
                elif self.path == LOGS:
                    collector.logs.append(ExportLogsServiceRequest.FromString(content))
                self.send_response(200 if self.path in {TRACES, LOGS} else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def spans(self) -> list[Span]:
        resources = [one for request in list(self.traces) for one in request.resource_spans]
        return [span for one in resources for scope in one.scope_spans for span in scope.spans]

    @property
    def records(self) -> list[LogRecord]:
        resources = [one for request in list(self.logs) for one in request.resource_logs]
        scopes = [scope for one in resources for scope in one.scope_logs]
        return [record for scope in scopes for record in scope.log_records]

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def attributes(of: Span | LogRecord) -> dict[str, Any]:
    """Those of a span or a log record, as Python's values."""
    kinds = {pair.key: pair.value.WhichOneof("value") or "" for pair in of.attributes}
    return {pair.key: getattr(pair.value, kinds[pair.key]) for pair in of.attributes}
