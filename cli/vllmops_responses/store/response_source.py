"""What stored responses are read from and changed through: a server's routes, or the store."""

from __future__ import annotations

from typing import Literal, Protocol, Self

import msgspec

from vllmops.support.error_codes import ErrorCode
from vllmops.support.errors import ExitCode, VllmopsError

from .backend import Response, ResponsePage, ResponseQuery
from .response_store import EventBatch


class ChangeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one response that something was to be done to.

    Args:
        id: its id.
        done: whether it is now as was wished.
        result: what was done, or why nothing was done, in words.
        code: the error's, as `VllmopsError` has it; empty where it is done.
        exit_code: what a command says of it.
    """

    id: str
    done: bool
    result: str
    code: ErrorCode | Literal[""] = ""
    exit_code: int = ExitCode.OK


class ResponseSource(Protocol):
    """Where stored responses are: a server, or the store itself.

    Each method raises VllmopsError where it can't, and StoreUnavailable where trying again may
    help.
    """

    name: str
    # Whether everybody's responses are seen, rather than one API key's.
    has_all_owners: bool

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def list_responses(self, query: ResponseQuery) -> ResponsePage:
        """Part of the responses; without their input, and their status in their body, over HTTP.

        Raises:
            CursorUnknown: ``after_id`` is none of them.
        """

    async def get(self, response_id: str) -> Response:
        """One of them.

        Raises:
            VllmopsError: ``responses.unknown``.
        """

    async def list_input_items(self, response: Response) -> bytes:
        """What its turn added to the conversation, a JSON array."""

    async def read_events(self, response: Response) -> list[EventBatch]:
        """What is kept of its stream, but for the event that tells its end."""

    async def cancel(self, response_id: str) -> ChangeResult:
        """Stop a run."""

    async def delete(self, response_id: str) -> ChangeResult:
        """Delete a response, and stop it where it runs."""


def make_unknown_error(name: str, response_id: str, *, is_certain: bool = True) -> VllmopsError:
    route = "" if is_certain else ", or no route that retrieves one"
    return VllmopsError(
        "responses.unknown",
        f"{name} has no response {response_id!r}{route}",
        "vllmops responses list shows which there are",
    )


def make_failed_result(response_id: str, error: VllmopsError) -> ChangeResult:
    """The outcome of what could not be done."""
    return ChangeResult(
        id=response_id,
        done=False,
        result="there is no such response" if error.code == "responses.unknown" else error.message,
        code=error.code,
        exit_code=error.exit_code,
    )


def make_refused_result(response_id: str, reason: str) -> ChangeResult:
    return ChangeResult(
        id=response_id,
        done=False,
        result=reason,
        code="responses.refused",
        exit_code=ExitCode.FAILED,
    )
