"""Loads for a recording: built-in ones, with inputs that never come twice, and commands."""

from __future__ import annotations

import base64
import os
import random
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from ..demo.inputs import png, wav
from ..errors import Exit, VllmopsError
from ..instances.servers import Server
from ..vllm_api import http
from ..vllm_api.http import KEY, key_for

CONNECTIONS = 32
TIMEOUT_S = 120.0
MODELS_TIMEOUT_S = 5.0
SHOWN = 300  # letters of what the server says
LOOK_S = 0.1
IMAGE_PIXELS = 224  # as wide as many models' inputs, so that each takes as much memory as usual
PROMPT_LETTERS = 300
TOKENS = 16


class Load(Protocol):
    """Something that makes a server work."""

    def run(self, number: int, stop: threading.Event) -> None:
        """Run one round to its end, or until `stop` is set.

        Args:
            number: of the round, from 1.
            stop: set from another thread.

        Raises:
            VllmopsError: ``load.failed`` or ``load.not-authorised``.
        """


@dataclass(frozen=True)
class Command:
    """A command of the user's own, run without a shell.

    Args:
        words: the command.
        environment: for it, besides ours.
    """

    words: list[str]
    environment: dict[str, str]

    def run(self, number: int, stop: threading.Event) -> None:
        environment = {**os.environ, **self.environment, "VLLMOPS_ROUND": str(number)}
        with tempfile.TemporaryFile() as said:
            try:
                process = subprocess.Popen(
                    self.words,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                )
            except OSError as error:
                raise failed(f"{self.words[0]} can't be run: {error.strerror}") from error
            try:
                while process.poll() is None and not stop.wait(LOOK_S):
                    pass
            finally:
                end(process)
            if process.returncode and not stop.is_set():
                said.seek(0)
                last = said.read().decode(errors="replace").strip().splitlines()[-1:]
                raise failed(
                    f"{shlex.join(self.words)} ended with {process.returncode}"
                    + "".join(f": {line}" for line in last)
                )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command that still runs."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class BuiltIn:
    """Requests that are made here.

    Args:
        name: one of `KINDS`.
        url: the server's.
        model: as the server calls it.
        requests: in each round.
        inputs: images in each request.
        seed: the first input's number; each has its own.
    """

    name: str
    url: str
    model: str
    requests: int
    inputs: int
    seed: int
    client: httpx.Client = field(repr=False)

    def run(self, number: int, stop: threading.Event) -> None:
        numbers = iter(range((number - 1) * self.requests, number * self.requests))
        taking = threading.Lock()
        errors: list[Exception] = []

        def work() -> None:
            while not stop.is_set() and not errors:
                with taking:
                    each = next(numbers, None)
                if each is None:
                    return
                try:
                    self.send(self.seed + each * self.inputs)
                except Exception as error:  # whatever it is, the load is not what was asked for
                    errors.append(error)

        # Daemons: Ctrl-C need not wait for answers.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(CONNECTIONS)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            stop.set()
            raise
        if errors:
            raise errors[0]

    def send(self, first: int) -> None:
        """One request."""
        path, given = KINDS[self.name](self.model, range(first, first + self.inputs))
        try:
            answer = self.client.post(f"{self.url}{path}", **given)
        except httpx.HTTPError as error:
            raise failed(f"{self.url}{path}: {str(error) or type(error).__name__}") from error
        check(answer, f"--load {self.name}")


def images(model: str, numbers: range) -> tuple[str, dict[str, Any]]:
    """A chat about some images."""
    urls = [f"data:image/png;base64,{coded(png(each, IMAGE_PIXELS))}" for each in numbers]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}
    return "/v1/chat/completions", {
        "json": {"model": model, "messages": [message], "max_tokens": TOKENS, "ignore_eos": True}
    }


def audio(model: str, numbers: range) -> tuple[str, dict[str, Any]]:
    """A transcription of one sound."""
    number = numbers[0]
    # `wav` has 4,000 pitches; from there on each is a little longer.
    sound = wav(number, 1.0 + number // 4000 % 4000 / 16_000)
    return "/v1/audio/transcriptions", {
        "data": {"model": model, "max_completion_tokens": TOKENS},
        "files": {"file": ("sound.wav", sound, "audio/wav")},
    }


def text(model: str, numbers: range) -> tuple[str, dict[str, Any]]:
    """A completion."""
    return "/v1/completions", {
        "json": {"model": model, "prompt": prose(numbers[0]), "max_tokens": TOKENS}
    }


def responses(model: str, numbers: range) -> tuple[str, dict[str, Any]]:
    """A response that is stored, where the server stores any."""
    return "/v1/responses", {
        "json": {
            "model": model,
            "input": prose(numbers[0]),
            "max_output_tokens": TOKENS,
            "store": True,
        }
    }


KINDS: dict[str, Callable[[str, range], tuple[str, dict[str, Any]]]] = {
    "images": images,
    "audio": audio,
    "text": text,
    "responses": responses,
}


def coded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def prose(number: int) -> str:
    """Letters and spaces, distinct by a number."""
    letters = random.Random(number).choices("abcdefghijklmnop    ", k=PROMPT_LETTERS)  # noqa: S311
    return "".join(letters)


def prepare(request: str, server: Server, *, requests: int, inputs: int, seed: int) -> Load:
    """The load that a request names.

    Args:
        request: one of `KINDS`, or a command.
        server: for which it is.
        requests: of a built-in load in each round.
        inputs: images in each request.
        seed: of its inputs.

    Raises:
        VllmopsError: ``load.no-command`` (exit code 2), ``load.no-url``, ``load.failed`` or
            ``load.not-authorised``.
    """
    if request not in KINDS:
        environment = {"VLLMOPS_URL": server.url or "", "VLLMOPS_MODEL": server.model or ""}
        with suppress(VllmopsError):
            environment["VLLMOPS_MODEL"] = served(connect(server), server)
        return Command(words(request), environment)
    client = connect(server)
    model = served(client, server)
    return BuiltIn(request, str(server.url), model, requests, inputs, seed, client)


def words(request: str) -> list[str]:
    """A command's words.

    Raises:
        VllmopsError: ``load.no-command``.
    """
    try:
        found = shlex.split(request)
    except ValueError as error:
        raise no_command(request, str(error).lower()) from error
    if not found or not shutil.which(found[0]):
        raise no_command(request, "there is no such program")
    return found


def no_command(request: str, why: str) -> VllmopsError:
    return VllmopsError(
        "load.no-command",
        f"--load {request!r} can't be run: {why}",
        f"one of {', '.join(KINDS)}, or a command (sh -c '…' where it needs a shell)",
        exit_code=Exit.USAGE,
    )


def connect(server: Server) -> httpx.Client:
    """A client with the user's API key, where the server may have it."""
    return httpx.Client(
        headers=key_for(str(server.url)).headers,
        timeout=TIMEOUT_S,
        # A proxy for the outside is not for a server on this machine, whose certificate is its own.
        trust_env=False,
        verify=False,  # noqa: S501
        mounts=http.MOUNTS,
    )


def served(client: httpx.Client, server: Server) -> str:
    """What the server calls its model.

    Raises:
        VllmopsError: ``load.no-url``, ``load.failed`` or ``load.not-authorised``.
    """
    if server.url is None:
        raise VllmopsError("load.no-url", f"{server.label} has no known address", "vllmops ps")
    url = f"{server.url}/v1/models"
    try:
        answer = client.get(url, timeout=MODELS_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise failed(f"{url}: {str(error) or type(error).__name__}") from error
    check(answer, url)
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise failed(f"{url} names no model") from error


def check(answer: httpx.Response, what: str) -> None:
    """Raise unless it is a success."""
    if answer.is_success:
        return
    if answer.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
        withheld = key_for(str(answer.request.url)).withheld
        why, hint = "has none that it takes", f"{KEY}=… vllmops memory record …"
        if withheld:
            why = f"was not sent: {withheld}"
            hint = "run vllmops as the user who started the server"
        raise VllmopsError(
            "load.not-authorised",
            f"{what}: the server wants an API key, and {KEY} {why}",
            hint,
            exit_code=Exit.NOT_AUTHORISED,
        )
    try:
        told = answer.json()
        why = told.get("error", told).get("message") or answer.text
    except (ValueError, AttributeError, TypeError, RecursionError):
        why = answer.text
    raise failed(f"{what}: the server answered {answer.status_code}: {why[:SHOWN]}")


def failed(message: str) -> VllmopsError:
    return VllmopsError(
        "load.failed",
        message,
        "another --load where the model does not take this one; vllmops status shows the server",
    )
