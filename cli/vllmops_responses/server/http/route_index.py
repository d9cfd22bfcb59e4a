"""Routes that a server finds at once, and that no other request has to pass.

vLLM's server compares each request with one route after the other, and its metrics do so again.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.routing import BaseRoute, Match, Mount
from starlette.types import Receive, Scope, Send

PREFIXES = ("/v1/responses", "/v1/conversations")
FOUND = "vllmops.route"


class RouteGroup(Mount):
    """Routes as one: a request is compared with them only if its path begins as theirs do.

    A mount, because vLLM's metrics look into those for the name of a route. What fits none of the
    routes passes it, and gets the answer of a server without it.

    Args:
        routes: whose paths all begin with one of `PREFIXES`.
    """

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        super().__init__("", routes=routes)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        if path.startswith(PREFIXES):
            for route in self.routes:
                match, child = route.matches(scope)
                if match is Match.FULL:
                    return match, {**child, FOUND: route}
        return Match.NONE, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope[FOUND].handle(scope, receive, send)


def group_routes(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Have an app look for some of its routes first, and at once.

    The app's list keeps them, behind all others: its description of the API is made of it.

    Args:
        app: that has the routes, or copies of them.
        routes: all whose paths begin with one of `PREFIXES`.
    """
    found = app.router.routes
    ours = [route for route in found if getattr(route, "path", "").startswith(PREFIXES)]
    others = [route for route in found if route not in ours]
    found[:] = [RouteGroup(routes), *others, *ours]
