"""A server with the routes of the Responses API, in a process of its own, and no model.

served.py PORT ours URL [KEY...]     our routes on a store
served.py PORT stock                 as many as vLLM has by itself
served.py PORT gateway               those of a gateway that knows how to answer, and no more
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, create_model

DOCUMENT = {"id": "resp_there", "object": "response", "status": "completed", "model": "m"}


class Vllm(MetaPathFinder, Loader):
    """Whatever our routes import of vLLM, empty: it takes ten seconds, and nothing is generated."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return (
            spec_from_loader(name, self, is_package=True) if name[:5] in {"vllm", "vllm."} else None
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = thing  # type: ignore[method-assign]


class Given(BaseModel):
    """A request with any input."""

    input: Any = None
    tools: list[Any] = []
    tool_choice: Any = "auto"

    @classmethod
    def input_item_parsing(cls, given: Any) -> Any:
        return given


def thing(name: str) -> Any:
    """Something of vLLM's."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name in {"with_cancellation", "load_aware_call"}:
        return lambda handler: handler
    if name == "validate_json_request":
        return lambda: None
    if name == "serving":
        return Namespace(OpenAIServingResponses=object)
    if name == "envs":
        return Namespace(VLLM_API_KEY=None)
    if name.endswith("Request"):
        return create_model(name, __base__=Given)
    if name == "construct_chat_messages_with_tool_call":
        return list
    return type(name, (Exception,) if "Error" in name else (), {"__module__": __name__})


def ours(url: str, keys: list[str]) -> FastAPI:
    sys.meta_path.insert(0, Vllm())
    from vllmops_responses.server.conversations.conversation_turns import (
        ConversationTurns,
    )
    from vllmops_responses.server.http import conversation_routes, routes
    from vllmops_responses.server.serving import StoreBackedServing
    from vllmops_responses.server.stored_responses import StoredResponsesApi
    from vllmops_responses.store import backend_factory
    from vllmops_responses.store.response_store import ResponseStore

    serving = StoreBackedServing.__new__(StoreBackedServing)
    serving.store = ResponseStore(backend_factory.make_backend(url), deadline_s=60)
    serving.conversations = ConversationTurns(serving.store)
    serving.stored_responses = StoredResponsesApi(
        serving.store, serving.conversations, serving.store.wake_followers
    )
    assert conversation_routes  # which adds to the others

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with serving.store:
            yield

    app = FastAPI(lifespan=lifespan)
    app.include_router(routes.router)
    app.state.args = Namespace(api_key=keys)
    app.state.openai_serving_responses = serving

    @app.middleware("http")
    async def authenticate(request: Request, call_next: Callable[..., Any]) -> Any:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if keys and request.url.path.startswith("/v1") and given not in keys:
            return JSONResponse({"error": "Unauthorized"}, 401)
        return await call_next(request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": []}

    return app


def theirs(*, stock: bool) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/responses")
    async def create() -> dict[str, Any]:
        return DOCUMENT

    @app.get("/v1/responses/{response_id}")
    async def retrieve(response_id: str) -> Any:
        if response_id == DOCUMENT["id"]:
            return DOCUMENT
        message = f"Response with id '{response_id}' not found."
        return JSONResponse({"error": {"message": message, "code": 404}}, 404)

    if stock:

        @app.get("/version")
        async def version() -> dict[str, str]:
            return {"version": "0.32.0"}

    else:

        @app.get("/v1/responses")
        async def connect() -> Any:  # agentic-api 0.9.0, to whom comes without a WebSocket
            return PlainTextResponse("Connection header did not include 'upgrade'", 400)

    return app


if __name__ == "__main__":
    port, kind, *words = sys.argv[1:]
    made = ours(words[0], words[1:]) if kind == "ours" else theirs(stock=kind == "stock")
    uvicorn.run(made, port=int(port), log_level="warning")
