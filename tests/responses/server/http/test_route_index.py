"""Routes as a group: what is found there, and what passes it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_fastapi_instrumentator import Instrumentator
from starlette.types import Scope

from vllmops_responses.server.http.route_index import RouteGroup, group_routes

ASKED: list[str] = []


class Counted(RouteGroup):
    """Notes which paths are compared with its routes."""

    def matches(self, scope: Scope) -> Any:
        found = super().matches(scope)
        ASKED.append(f"{scope['path']} {found[0].name}")
        return found


def make_instrumented_app(root_path: str = "") -> tuple[FastAPI, CollectorRegistry]:
    """An app with a group among others, and its metrics."""
    app, router = FastAPI(root_path=root_path), APIRouter()

    @app.get("/health")
    def health() -> str:
        return "healthy"

    @router.get("/v1/responses/{name}")
    def answer_name(name: str) -> str:
        return name

    @router.get("/v1/responses")
    def answer_limit(limit: int = 20) -> int:
        return limit

    @app.get("/v1/responses_of_a_plug_in")
    def plug_in() -> str:
        return "plug-in"

    @app.get("/v1/other")
    def answer_other_route() -> str:
        return "other"

    registry = CollectorRegistry()
    app.include_router(router)
    Instrumentator(registry=registry).instrument(app)
    group_routes(app, router.routes)
    return app, registry


def get(app: FastAPI, path: str, method: str = "GET") -> httpx.Response:
    async def send_request() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.request(method, path)

    return asyncio.run(send_request())


@pytest.mark.parametrize("root_path", ["", "/behind/a/proxy"])
@pytest.mark.parametrize(
    ("method", "path", "status", "answer"),
    [
        ("GET", "/health", 200, "healthy"),
        ("GET", "/v1/other", 200, "other"),
        ("GET", "/v1/responses/a", 200, "a"),
        ("GET", "/v1/responses?limit=3", 200, 3),
        ("DELETE", "/v1/responses/a", 405, {"detail": "Method Not Allowed"}),
        ("GET", "/v1/responses/a/b", 404, {"detail": "Not Found"}),
        ("GET", "/v1/responses_of_a_plug_in", 200, "plug-in"),
        ("GET", "/v1/responsesa", 404, {"detail": "Not Found"}),
        ("GET", "/elsewhere", 404, {"detail": "Not Found"}),
    ],
)
def test_each_request_finds_its_route(
    method: str, path: str, status: int, answer: Any, root_path: str
) -> None:
    app, _ = make_instrumented_app(root_path)
    found = get(app, path, method)
    assert (found.status_code, found.json()) == (status, answer)


def test_a_path_with_a_slash_is_sent_on() -> None:
    app, _ = make_instrumented_app()
    found = get(app, "/v1/responses/")
    assert (found.status_code, found.headers["location"]) == (307, "http://here/v1/responses")


def test_the_app_behind_a_prefix() -> None:
    app, _ = make_instrumented_app("/behind")
    found = get(app, "/behind/v1/responses/a")
    assert (found.status_code, found.json()) == (200, "a")


def test_no_other_request_is_compared_with_its_routes() -> None:
    app, _ = make_instrumented_app()
    first = app.router.routes[0]
    assert isinstance(first, RouteGroup)
    app.router.routes[0] = Counted(first.routes)
    ASKED.clear()
    get(app, "/v1/other")
    assert set(ASKED) == {"/v1/other NONE"}
    paths = [getattr(route, "path", "") for route in app.router.routes]
    assert paths.index("/v1/other") < paths.index("/v1/responses")


def test_descriptions_and_metrics_name_its_routes() -> None:
    app, registry = make_instrumented_app()
    paths = set(app.openapi()["paths"])
    assert {"/health", "/v1/other", "/v1/responses", "/v1/responses/{name}"} <= paths
    get(app, "/v1/responses/a")
    get(app, "/v1/other")
    text = generate_latest(registry).decode()
    assert 'handler="/v1/responses/{name}"' in text
    assert 'handler="/v1/other"' in text
