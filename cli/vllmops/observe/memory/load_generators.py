"""Loads for a recording: built-in ones, whose inputs never repeat, and the user's commands."""

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

from ...collect.http import vllm_client
from ...collect.http.vllm_client import KEY, build_api_key_headers
from ...demo.inputs import make_png, make_wav
from ...servers.discovery import Server
from ...support.errors import VllmopsError

CONNECTIONS = 32
TIMEOUT_S = 120.0
MODELS_TIMEOUT_S = 5.0
SHOWN = 300  # characters of the server's error message
LOOK_S = 0.1
IMAGE_PIXELS = 224  # the input width of many models, so that memory use is typical
PROMPT_LETTERS = 300
TOKENS = 16


class Load(Protocol):
    """Work for a server."""

    def run_round(self, number: int, stop: threading.Event) -> None:
        """Run one round to its end, or until `stop` is set.

        Args:
            number: the number of the round, from 1.
            stop: an event that another thread sets.

        Raises:
            VllmopsError: ``load.failed`` or ``load.not-authorised``.
        """


@dataclass(frozen=True)
class CommandLoad:
    """A command of the user, run without a shell.

    Args:
        arguments: the command and its arguments.
        environment: variables in addition to this process's own.
    """

    arguments: list[str]
    environment: dict[str, str]

    def run_round(self, number: int, stop: threading.Event) -> None:
        environment = {**os.environ, **self.environment, "VLLMOPS_ROUND": str(number)}
        with tempfile.TemporaryFile() as output:
            try:
                process = subprocess.Popen(
                    self.arguments,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=output,
                )
            except OSError as error:
                raise make_load_error(
                    f"{self.arguments[0]} can't be run: {error.strerror}"
                ) from error
            try:
                while process.poll() is None and not stop.wait(LOOK_S):
                    pass
            finally:
                stop_command(process)
            if process.returncode and not stop.is_set():
                output.seek(0)
                last = output.read().decode(errors="replace").strip().splitlines()[-1:]
                raise make_load_error(
                    f"{shlex.join(self.arguments)} ended with exit code {process.returncode}"
                    + "".join(f": {line}" for line in last)
                )


def stop_command(process: subprocess.Popen[bytes]) -> None:
    """End a command if it still runs."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class BuiltInLoad:
    """Requests that vllmops sends itself.

    Args:
        name: one of `KINDS`.
        url: the server's URL.
        model: the model's name on the server.
        requests: requests in each round.
        inputs: images in each request.
        seed: the number of the first input; every input has a number of its own.
        headers: of each request, with the user's API key if `build_api_key_headers` allows it.
    """

    name: str
    url: str
    model: str
    requests: int
    inputs: int
    seed: int
    headers: dict[str, str] = field(repr=False)

    def run_round(self, number: int, stop: threading.Event) -> None:
        numbers = iter(range((number - 1) * self.requests, number * self.requests))
        taking = threading.Lock()
        errors: list[Exception] = []

        def send_requests() -> None:
            while not stop.is_set() and not errors:
                with taking:
                    request = next(numbers, None)
                if request is None:
                    return
                try:
                    self.send_request(self.seed + request * self.inputs)
                except Exception as error:  # any error means that the load is not as asked
                    errors.append(error)

        # Daemon threads, so that Ctrl-C does not wait for responses.
        threads = [threading.Thread(target=send_requests, daemon=True) for _ in range(CONNECTIONS)]
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

    def send_request(self, first_input: int) -> None:
        """Send one request; ``first_input`` is the number of its first input."""
        path, content = KINDS[self.name](self.model, range(first_input, first_input + self.inputs))
        try:
            response = vllm_client.send_request(
                "POST", f"{self.url}{path}", TIMEOUT_S, headers=self.headers, **content
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise make_load_error(
                f"{self.url}{path}: {str(error) or type(error).__name__}"
            ) from error
        require_success(response, f"--load {self.name}")


def make_image_request(model: str, numbers: range) -> tuple[str, dict[str, Any]]:
    """A chat request with images."""
    urls = [
        f"data:image/png;base64,{encode_base64(make_png(number, IMAGE_PIXELS))}"
        for number in numbers
    ]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}
    return "/v1/chat/completions", {
        "json": {"model": model, "messages": [message], "max_tokens": TOKENS, "ignore_eos": True}
    }


def make_audio_request(model: str, numbers: range) -> tuple[str, dict[str, Any]]:
    """A transcription request with one sound."""
    number = numbers[0]
    # `make_wav` has 4,000 pitches; after those, each sound is a little longer.
    sound = make_wav(number, 1.0 + number // 4000 % 4000 / 16_000)
    return "/v1/audio/transcriptions", {
        "data": {"model": model, "max_completion_tokens": TOKENS},
        "files": {"file": ("sound.wav", sound, "audio/wav")},
    }


def make_text_request(model: str, numbers: range) -> tuple[str, dict[str, Any]]:
    """A completion request."""
    return "/v1/completions", {
        "json": {"model": model, "prompt": make_random_text(numbers[0]), "max_tokens": TOKENS}
    }


def make_response_request(model: str, numbers: range) -> tuple[str, dict[str, Any]]:
    """A request for a response, which the server stores if it has a store."""
    return "/v1/responses", {
        "json": {
            "model": model,
            "input": make_random_text(numbers[0]),
            "max_output_tokens": TOKENS,
            "store": True,
        }
    }


KINDS: dict[str, Callable[[str, range], tuple[str, dict[str, Any]]]] = {
    "images": make_image_request,
    "audio": make_audio_request,
    "text": make_text_request,
    "responses": make_response_request,
}


def encode_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def make_random_text(number: int) -> str:
    """Letters and spaces, different for each number."""
    letters = random.Random(number).choices("abcdefghijklmnop    ", k=PROMPT_LETTERS)  # noqa: S311
    return "".join(letters)


def build_load(request: str, server: Server, *, requests: int, inputs: int, seed: int) -> Load:
    """The load that ``--load`` names.

    Args:
        request: one of `KINDS`, or a command.
        server: the server to load.
        requests: requests of a built-in load in each round.
        inputs: images in each request.
        seed: the seed of a built-in load's inputs.

    Raises:
        VllmopsError: ``load.no-command`` (exit code 2), ``load.no-url``, ``load.failed`` or
            ``load.not-authorised``.
    """
    if request not in KINDS:
        environment = {"VLLMOPS_URL": server.url or "", "VLLMOPS_MODEL": server.model or ""}
        with suppress(VllmopsError):
            environment["VLLMOPS_MODEL"] = fetch_model_name(server)
        return CommandLoad(split_command(request), environment)
    model, url = fetch_model_name(server), str(server.url)
    # Whose port it is takes a look at all sockets: once, not for each request.
    return BuiltInLoad(
        request, url, model, requests, inputs, seed, build_api_key_headers(url).headers
    )


def split_command(request: str) -> list[str]:
    """Split a command into words.

    Raises:
        VllmopsError: ``load.no-command``.
    """
    try:
        command = shlex.split(request)
    except ValueError as error:
        raise make_no_command_error(request, str(error).lower()) from error
    if not command or not shutil.which(command[0]):
        raise make_no_command_error(request, "no such program")
    return command


def make_no_command_error(request: str, reason: str) -> VllmopsError:
    return VllmopsError(
        "load.no-command",
        f"--load {request!r} can't be run: {reason}",
        f"one of {', '.join(KINDS)}, or a command (sh -c '…' where it needs a shell)",
    )


def fetch_model_name(server: Server) -> str:
    """The model's name on the server.

    Raises:
        VllmopsError: ``load.no-url``, ``load.failed`` or ``load.not-authorised``.
    """
    if server.url is None:
        raise VllmopsError("load.no-url", f"{server.label} has no known address", "vllmops ps")
    url = f"{server.url}/v1/models"
    try:
        response = vllm_client.send_request(
            "GET", url, MODELS_TIMEOUT_S, headers=build_api_key_headers(url).headers
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise make_load_error(f"{url}: {str(error) or type(error).__name__}") from error
    require_success(response, url)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise make_load_error(f"{url} lists no model") from error


def require_success(response: httpx.Response, subject: str) -> None:
    """Raise unless the response is a success."""
    if response.is_success:
        return
    if response.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
        withheld = build_api_key_headers(str(response.request.url)).withheld
        why, hint = f"API key missing or rejected ({KEY})", f"{KEY}=… vllmops memory record …"
        if withheld:
            why = f"the API key in {KEY} was not sent: {withheld}"
            hint = "run vllmops as the user who started the server"
        raise VllmopsError("load.not-authorised", f"{subject}: {why}", hint)
    try:
        body = response.json()
        why = body.get("error", body).get("message") or response.text
    except (ValueError, AttributeError, TypeError, RecursionError):
        why = response.text
    raise make_load_error(f"{subject}: the server answered {response.status_code}: {why[:SHOWN]}")


def make_load_error(message: str) -> VllmopsError:
    return VllmopsError(
        "load.failed",
        message,
        "use another --load if the model does not support this one; see vllmops status",
    )
