"""Threads that read and write an engine's sockets: an uncaught error ends one for good.

A new thread opens the same sockets again, as vLLM does at start (vLLM #26195, #31404). Of a message
that could not be encoded, the outputs of the requests that are not to blame are sent after all.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from ...model.healing import HealProof
from ..hooks import vllm_objects
from ..state import engine, fatal_messages
from ..versions import engine as adapter

READER, WRITER, LOOP = "process_input_sockets", "process_output_sockets", "run_busy_loop"
NAMES = {READER: "input thread", WRITER: "output thread"}
ENCODES = {"encode", "encode_into"}
READY_S = 5.0
ERROR_LETTERS = 300


class ThreadDeath(NamedTuple):
    """The end of a thread.

    Args:
        error: what it raised.
        requests: ids of the requests whose message it had.
        unsent_part: what of that message is still to be sent; None if nothing is.
    """

    error: str
    requests: tuple[str, ...]
    unsent_part: tuple[int, Any] | None = None


_deaths: dict[str, ThreadDeath] = {}


def install_excepthook() -> None:
    """Note why a thread of an engine ends; idempotent."""
    before = threading.excepthook
    if hasattr(before, "__vllmops__"):
        return

    def note_and_call_hook(args: Any) -> None:
        with suppress(Exception):
            note_thread_death(args.exc_value, args.exc_traceback)
        before(args)

    note_and_call_hook.__vllmops__ = True  # type: ignore[attr-defined]
    threading.excepthook = note_and_call_hook


def note_thread_death(error: BaseException, traceback: TracebackType | None) -> None:
    """Keep what ended a thread, and whose message it had."""
    calls = []
    while traceback is not None:
        calls.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for number, frame in enumerate(calls):
        name = frame.f_code.co_name
        if name in NAMES:
            # In its own frame, the reader may still have the request of an earlier message.
            found = [frame.f_locals.get("output")] if name == WRITER else []
            inner = calls[number + 1 :]
            for call in inner:
                found += [call.f_locals.get(word) for word in ("request", "req")]
            rest = None
            if any(call.f_code.co_name in ENCODES for call in inner):
                with suppress(Exception):  # another version's message: all of it is lost
                    found, rest = split_unencodable_outputs(
                        frame.f_locals["output"], frame.f_locals["encoder"]
                    )
            text = f"{type(error).__name__}: {error}"[:ERROR_LETTERS]
            _deaths[name] = death = ThreadDeath(
                text, tuple(dict.fromkeys(list_request_ids(found))), rest
            )
            with suppress(Exception):  # what is left of it would be for a bundle alone
                parts = (
                    fatal_messages.find_message_parts(frame, inner)
                    if name == READER
                    else fatal_messages.encode_outputs(found)
                )
                fatal_messages.keep_fatal_message(NAMES[name], text, death.requests, parts)


def split_unencodable_outputs(
    message: tuple[int, Any], encoder: Any
) -> tuple[list[Any], tuple[int, Any] | None]:
    """The outputs of a message that can't be encoded, and the message without them.

    Nothing of it was sent.
    """
    client, whole = message

    def can_encode(outputs: list[Any]) -> bool:
        with suppress(Exception):
            encoder.encode(msgspec.structs.replace(whole, outputs=outputs))
            return True
        return False

    good = [output for output in whole.outputs if can_encode([output])]
    if not can_encode(good):
        return [message], None
    bad = [output for output in whole.outputs if not any(output is one for one in good)]
    return bad, (client, msgspec.structs.replace(whole, outputs=good))


def list_request_ids(thread_items: list[Any]) -> list[str]:
    """The ids of requests in what a thread had: requests, or outputs for a client."""
    names = []
    for one in thread_items:
        outputs = getattr(one[1], "outputs", ()) if isinstance(one, tuple) else (one,)
        names += [output.request_id for output in outputs if hasattr(output, "request_id")]
    return names


def find_dead_threads() -> list[HealProof]:
    """The threads that are gone, while the engine's main loop runs."""
    core = vllm_objects.find_latest("engine-core")
    if core is None or not hasattr(core, "addresses"):
        return []
    running = {
        name for frame in sys._current_frames().values() for name in list_function_names(frame)
    }
    return [
        HealProof(
            subject=title,
            evidence=f"it has ended: {death.error}" if death else "it has ended, nobody knows why",
            requests=death.requests if death else (),
            progress_key=str(death),
        )
        for name, title in NAMES.items()
        if LOOP in running and name not in running
        for death in (_deaths.get(name),)
    ]


def list_function_names(frame: Any) -> list[str]:
    """The functions that a thread is in."""
    found = []
    while frame is not None:
        found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found


def restart_threads(subjects: list[str]) -> dict[str, str]:
    """Start the threads again that a look still misses; returns why one was not.

    In an API server: let the new reader have the place of the old one.
    """
    core = vllm_objects.find_latest("engine-core")
    if core is None:
        return allow_reconnection(subjects)
    gone = {proof.subject for proof in find_dead_threads()} & set(subjects)
    left: dict[str, str] = {}
    for name, title in NAMES.items():
        if title in gone and (why := restart_thread(core, name)):
            left[title] = why
    return left


def allow_reconnection(subjects: list[str]) -> dict[str, str]:
    """Have a new connection of an engine take over from the one before.

    vLLM reads nothing from this socket once the server is up. So the old connection's end is never
    read, and its name stays taken: messages for the engine would go nowhere.
    """
    try:
        client, loop = engine.require_front_end()
        option = adapter.enable_router_handover(client)
        asyncio.run_coroutine_threadsafe(option, loop).result(READY_S)
    except (RuntimeError, TimeoutError, AttributeError) as error:
        return dict.fromkeys(subjects, f"its API server can't connect to it again: {error!r}")
    return {}


def restart_thread(core: Any, name: str) -> str:
    """Start a thread of an engine; returns why that failed."""
    addresses, ready = core.addresses, threading.Event()
    if name == WRITER and name not in _deaths:
        return "it is not known whose output it had: that client would get an answer with a hole"
    arguments: tuple[Any, ...] = (
        addresses.outputs,
        addresses.coordinator_output,
        core.engine_index,
    )
    if name == READER:
        identity = core.engine_index.to_bytes(length=2, byteorder="little")
        arguments = (addresses.inputs, addresses.coordinator_input, identity, ready)
    target = getattr(core, name)
    try:
        inspect.signature(target).bind(*arguments)
    except TypeError as error:
        return f"this vLLM starts it in another way: {error}"
    death = _deaths.pop(name, None)
    if death and death.unsent_part:
        with core.output_queue.mutex:
            core.output_queue.queue.appendleft(death.unsent_part)
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    if name == WRITER:
        core.output_thread = thread  # a shutdown waits for it
    elif not ready.wait(READY_S):
        return f"it is not ready {READY_S:g} s after its start"
    return ""
