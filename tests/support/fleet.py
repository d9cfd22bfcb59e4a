"""A server of several processes with agents and admin routes, and no vLLM."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from vllmops.model.environment import ADMIN_TOKEN_FILE, KEYRING

from .children import CHILD, Child, Spawn

TOKEN = "t0ken-" * 8
SERVING = f"""
import socket, subprocess, threading, uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse
app = FastAPI()
@app.middleware("http")
async def authenticate(request, call_next):
    if request.url.path.startswith("/v1") and (
        request.headers.get("authorization") != "Bearer user"
    ):
        return JSONResponse({{"error": "Unauthorized"}}, 401)
    return await call_next(request)
@app.get("/health")
def health(): pass
@app.get("/metrics")
def metrics(): return PlainTextResponse("")
@app.get("/version")
def version(): return {{"version": "0.32.0"}}
below = [
    subprocess.Popen([title, {str(CHILD)!r}], executable={sys.executable!r}, stdin=subprocess.PIPE,
                     stdout=subprocess.PIPE)
    for title in ("VLLM::EngineCore_DP1", "VLLM::Worker_DP1_TP0")
]
for child in below: child.stdout.readline()
listening = socket.create_server(("127.0.0.1", 0))
server = uvicorn.Server(uvicorn.Config(app, log_config=None))
threading.Thread(target=server.run, kwargs={{"sockets": [listening]}}, daemon=True).start()
out = listening.getsockname()[1], *(child.pid for child in below)
"""


def token_file(folder: Path) -> Path:
    """A file with `TOKEN`."""
    path = folder / "admin.token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


class Fleet:
    """An API server, an engine and a worker.

    Args:
        spawn: starts the API server.
        folder: for its state and its token.
        token: whether it has one.
    """

    def __init__(self, spawn: Spawn, folder: Path, *, token: bool = True) -> None:
        self.token = token_file(folder)
        place = {ADMIN_TOKEN_FILE: str(self.token)} if token else {}
        # Its state directory is none of the command line's.
        self.child: Child = spawn(
            title="VLLM::APIServer",
            home=folder / "there",
            **{KEYRING: str(folder / "ring"), **place},
        )
        port, self.engine, self.worker = eval(self.child.run(SERVING))
        self.api = self.child.process.pid
        self.url = f"http://127.0.0.1:{port}"

    def words(self) -> tuple[str, ...]:
        """What names it on a command line."""
        return ("-t", self.url, "--admin-token", str(self.token))

    def kill(self) -> None:
        """Kill what `spawn` does not know."""
        for pid in (self.engine, self.worker):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def pids(self) -> dict[str, int]:
        return {"api": self.api, "engine": self.engine, "worker": self.worker}
