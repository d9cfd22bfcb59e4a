"""As much of a Kubernetes API server as forwards a port of a pod, over WebSockets as it does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

CONFIG = """
apiVersion: v1
kind: Config
current-context: test
clusters: [{{name: test, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: test, user: {{token: {token}}}}}]
contexts: [{{name: test, context: {{cluster: test, user: test}}}}]
"""
TOKEN = "cluster-token"
DATA = b"\x00"


class Cluster:
    """A cluster with one pod.

    Args:
        pod: its namespace and its name.
        port: of this machine, which stands for the one in the pod.
    """

    def __init__(self, pod: tuple[str, str], port: int) -> None:
        self.path = "/api/v1/namespaces/{}/pods/{}/portforward".format(*pod)
        self.port = port
        self.asked: list[tuple[str, str | None]] = []
        up: threading.Event = threading.Event()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.run, args=(up.set,), daemon=True)
        self.thread.start()
        assert up.wait(60)

    def run(self, up: Callable[[], None]) -> None:
        async def main() -> None:
            protocols = ["v4.channel.k8s.io"]
            async with serve(
                self.forward,
                "127.0.0.1",
                0,
                subprotocols=protocols,  # type: ignore[arg-type]
                process_request=self.check,
            ) as server:
                self.api_port = next(iter(server.sockets)).getsockname()[1]
                self.over = asyncio.Event()
                up()
                await self.over.wait()

        self.loop.run_until_complete(main())

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.over.set)
        self.thread.join(60)

    def configuration(self, folder: Path) -> dict[str, str]:
        """What the environment says of it."""
        path = folder / "kubeconfig"
        path.write_text(CONFIG.format(port=self.api_port, token=TOKEN))
        return {"KUBECONFIG": str(path)}

    def check(self, connection: ServerConnection, request: Request) -> Response | None:
        parts = urlsplit(request.path)
        self.asked.append((request.path, request.headers.get("authorization")))
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return connection.respond(401, "no")
        if parts.path != self.path:
            return connection.respond(404, "no such pod")
        return None

    async def forward(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        (port,) = parse_qs(urlsplit(connection.request.path).query)["ports"]
        number = int(port).to_bytes(2, "little")
        await connection.send(b"\x00" + number)
        await connection.send(b"\x01" + number)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)

        async def return_data() -> None:
            while chunk := await reader.read(65536):
                await connection.send(DATA + chunk)
            await connection.close()

        task = asyncio.ensure_future(return_data())
        with suppress(ConnectionClosed):
            async for frame in connection:
                assert isinstance(frame, bytes)
                assert frame[:1] == DATA
                writer.write(frame[1:])
        writer.close()
        task.cancel()
