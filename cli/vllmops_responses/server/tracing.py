"""Spans of the Responses API in vLLM's own traces, where ``--otlp-traces-endpoint`` turns them on.

A span says what was done, for how long, how many bytes it was and how it ended. It holds nothing
of a conversation, no id of a response, no owner, and no text of an error, which may hold those.
vLLM's exporter sends the spans in a thread; while its collector can't be reached, they are dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from vllmops.agent.hooks.vllm_objects import report_problem

from ..store.backend import OPERATIONS, Backend, Response, ResponsePage, StatusChange

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

# What a request does to the store once or twice: methods of a backend. Others do it again and again
# beside requests.
TRACED_METHODS: Final = (
    "create",
    "put",
    "set_status",
    "get",
    "delete",
    "list_responses",
    "list_turns",
)
HEADERS: Final = (b"traceparent", b"tracestate")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_tracer: Tracer | None = None


def start_tracing(backend: Backend) -> None:
    """Make spans from now on, and one for each operation of a backend; never raises.

    Args:
        backend: of this server's store.
    """
    global _tracer  # noqa: PLW0603 - a process has one
    try:
        from opentelemetry import trace  # noqa: PLC0415 - nobody else needs it
        from opentelemetry.trace.propagation import tracecontext  # noqa: F401, PLC0415

        name = type(backend).__name__.lower()
        for method in TRACED_METHODS:
            call = getattr(backend, method)
            setattr(backend, method, wrap_with_span(call, name, OPERATIONS[method]))
        _tracer = trace.get_tracer("vllmops")
    except Exception as error:
        report_problem(f"traces lack the store and the carriers: {error!r}")


@contextmanager
def start_span(name: str, attributes: Mapping[str, str | int]) -> Iterator[Callable[[int], object]]:
    """A span below that of the request at hand; none where there is no such request.

    Args:
        name: of the span, without ``vllmops.``.
        attributes: without ``vllmops.``.

    Returns:
        Adds bytes to its attribute ``vllmops.bytes``.
    """
    if _tracer is None:
        yield int
        return
    from opentelemetry import trace  # noqa: PLC0415 - see `start_tracing`

    # Of a background run, the request may be over.
    if not trace.get_current_span().get_span_context().trace_flags.sampled:
        yield int
        return
    count, status = 0, "ok"

    def add_bytes(size: int) -> None:
        nonlocal count
        count += size

    with _tracer.start_as_current_span(
        f"vllmops.{name}",
        attributes={f"vllmops.{key}": value for key, value in attributes.items()},
        record_exception=False,
        set_status_on_exception=False,
    ) as made:
        try:
            yield add_bytes
        except BaseException as error:
            status = "failed"
            made.set_attribute("error.type", type(error).__name__)
            made.set_status(trace.StatusCode.ERROR)
            raise
        finally:
            made.set_attribute("vllmops.bytes", count)
            made.set_attribute("vllmops.status", status)


def wrap_with_span(
    call: Callable[..., Awaitable[Any]], backend: str, operation: str
) -> Callable[..., Awaitable[Any]]:
    """A method of a backend with a span."""
    attributes = {"store.backend": backend, "store.operation": operation}

    @functools.wraps(call)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        with start_span(f"store.{operation}", attributes) as add:
            result = await call(*args, **kwargs)
            add(sum(map(count_response_bytes, (*args, result))))
            return result

    return wrapper


def count_response_bytes(value: Any) -> int:
    """Bytes of the responses in what a method of a backend takes or gives."""
    match value:
        case Response():
            return len(value.body) + len(value.input)
        case StatusChange():
            return count_response_bytes(value.response)
        case ResponsePage():
            return count_response_bytes(value.responses)
        case list():
            return sum(map(count_response_bytes, value))
    return 0


async def answer_in_span(
    route: str,
    answer: Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]],
    scope: MutableMapping[str, Any],
    receive: Receive,
    send: Send,
) -> None:
    """Answer an HTTP request in a span, until the last byte of the answer is sent.

    The span is below the one that the client names in its header ``traceparent``.

    Args:
        route: its path, with names instead of ids.
        answer: answers it.
        scope: of ASGI.
        receive: of ASGI.
        send: of ASGI.
    """
    if _tracer is None:
        await answer(scope, receive, send)
        return
    from opentelemetry import trace  # noqa: PLC0415 - see `start_tracing`
    from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415

    context = None
    if not trace.get_current_span().get_span_context().is_valid:
        headers = {
            key.decode(): value.decode("latin-1")
            for key, value in scope["headers"]
            if key in HEADERS
        }
        context = tracecontext.TraceContextTextMapPropagator().extract(headers)
    attributes = {"http.request.method": scope["method"], "http.route": route}
    with _tracer.start_as_current_span(
        f"{scope['method']} {route}",
        context,
        trace.SpanKind.SERVER,
        attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as made:

        async def send_and_note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                made.set_attribute("http.response.status_code", message["status"])
            await send(message)

        await answer(scope, receive, send_and_note_status)


def make_trace_headers() -> Mapping[str, str] | None:
    """The headers that put vLLM's span of a request below the span at hand; None without one."""
    if _tracer is None:
        return None
    from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415 - see `start_tracing`

    carrier: dict[str, str] = {}
    tracecontext.TraceContextTextMapPropagator().inject(carrier)
    return carrier or None
