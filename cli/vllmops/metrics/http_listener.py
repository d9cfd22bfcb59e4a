"""Shows metrics over HTTP, as prometheus_client does, to slow clients and many of them, too."""

from __future__ import annotations

import socket
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from ..support.http_server import SILENT_S, BoundedServerMixin


def make_metrics_server(host: str, port: int, registry: CollectorRegistry) -> WSGIServer:
    """A server of metrics, which listens already; raises OSError.

    Args:
        host: a name or an address.
        port: where.
        registry: what it shows.
    """
    family, *_, place = socket.getaddrinfo(host, port, flags=socket.AI_PASSIVE)[0]

    class MetricsServer(BoundedServerMixin, WSGIServer):
        address_family = family

    return make_server(str(place[0]), port, make_wsgi_app(registry), MetricsServer, ScrapeHandler)


class ScrapeHandler(WSGIRequestHandler):
    """Answers one scrape."""

    timeout = SILENT_S

    def log_message(self, *_: object) -> None:
        """Nobody reads a line for each scrape."""
