"""Commands that work on several servers, also on other machines: the one place that knows how.

``-t`` may be given again and again, and ``-t @FILE`` names a file with a target on each line. The
servers are asked at the same time, so that one that does not answer holds up no other one.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import copy_context
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..model.environment import ADMIN_TOKEN_FILE
from ..model.targets import RemoteAccess, access, parse_target
from ..support import output
from ..support.errors import VllmopsError, make_usage_error
from ..support.output import Result, print_result
from .options import AdminToken

if TYPE_CHECKING:
    from concurrent.futures import Future

    from rich.console import RenderableType

MOST_AT_ONCE = 64
MOST_BYTES = 1 << 20  # of a file with targets
# Options that a single server can have, by parameter.
SINGLE = {
    "file": "FILE",
    "name": "TARGET",
    "save": "--save",
    "core": "--core",
    "plot_": "--plot",
    "watch": "--watch",
}


def run_per_target(run: Callable[..., Result]) -> Callable[..., None]:
    """Make a Typer command of a function with one ``target``, which then may be given repeatedly.

    The command also gets ``--admin-token``, as by `allow_remote_target`.
    """

    def run_for_targets(target: Sequence[str] | None = None, **options: Any) -> Result:
        given = target or ()
        if len(given) < 2 and not any(word.startswith("@") for word in given):
            return run(target=next(iter(given), None), **options)
        for name, option in SINGLE.items():
            if options.get(name):
                raise make_usage_error(
                    f"{option} works with one server, not with several", "use one --target"
                )
        return run_concurrently(list(expand_targets(given)), functools.partial(run, **options))

    return allow_remote_target(run_for_targets, run, make_repeatable)


def allow_remote_target(
    run: Callable[..., Result],
    like: Callable[..., Result] | None = None,
    target: Callable[[Any], Any] = lambda annotation: annotation,
) -> Callable[..., None]:
    """Make a Typer command of a function with a ``target``, which may be on another machine.

    The command gets ``--admin-token``.

    Args:
        run: the function.
        like: the one whose parameters and help it has, if not its own.
        target: makes the annotation of ``target`` from the function's own.
    """

    @functools.wraps(like or run)
    def run_with_access(admin_token: Path | None = None, **options: Any) -> Result:
        # One that was typed is checked in any case; one from the environment may not be needed.
        if admin_token and str(admin_token) != os.environ.get(ADMIN_TOKEN_FILE):
            from ..collect.agents.admin_token import read_admin_token  # noqa: PLC0415

            read_admin_token(admin_token)
        access.set(RemoteAccess(admin_token))
        return run(**options)

    signature = inspect.signature(like or run, eval_str=True)
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.name == "target":
            token = parameter.replace(name="admin_token", annotation=AdminToken)
            parameters += [parameter.replace(annotation=target(parameter.annotation)), token]
        else:
            parameters.append(parameter)
    run_with_access.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run_with_access.__annotations__ = {p.name: p.annotation for p in parameters}
    return print_result(run_with_access)


def make_repeatable(annotation: Any) -> Any:
    """The annotation of an option that may be given again and again."""
    (option,) = annotation.__metadata__
    option = copy(option)
    option.help = f"{option.help} Repeatable; @FILE has one on each line."
    return Annotated[list[str] | None, option]


def expand_targets(arguments: Sequence[str]) -> dict[str, None]:
    """The targets that were given, each once, those in files included.

    Raises:
        VllmopsError: ``usage``, ``file.unreadable`` or ``file.too-large``.
    """
    targets: dict[str, None] = {}
    for word in arguments:
        if not word.startswith("@"):
            targets[word] = None
            continue
        for line in read_target_lines(Path(word[1:])):
            parse_target(line)
            targets[line] = None
    return targets


def read_target_lines(path: Path) -> Iterator[str]:
    """The lines of a file, without blank ones and comments.

    Raises:
        VllmopsError: ``usage`` if none is left, or as `files.read_input` does.
    """
    from ..support.files import read_input  # noqa: PLC0415

    text = read_input(path, MOST_BYTES).decode(errors="replace")
    targets = [line for raw in text.splitlines() if (line := raw.partition("#")[0].strip())]
    if not targets:
        raise make_usage_error(f"{path} names no target", "one target on each line")
    yield from targets


def run_concurrently(targets: Sequence[str], run: Callable[..., Result]) -> Result:
    """Run a command for each target at the same time.

    Returns:
        All results; the exit code is the highest one.
    """
    from concurrent.futures import Future  # noqa: PLC0415 - slow to import, for several alone

    futures: dict[str, Future[Result]] = {target: Future() for target in targets}
    waiting = deque(futures.items())

    def run_worker() -> None:
        while waiting:
            with suppress(IndexError):  # another thread was faster
                copy_context().run(run_target, *waiting.popleft())

    def run_target(target: str, future: Future[Result]) -> None:
        output.speaker.set(target)
        try:
            future.set_result(run(target=target))
        except BaseException as error:
            future.set_exception(error)

    for _ in range(min(len(targets), MOST_AT_ONCE)):
        # Daemons: at a Ctrl-C the process does not wait for them.
        threading.Thread(target=copy_context().run, args=(run_worker,), daemon=True).start()
    outcomes = {target: wait_for_result(done) for target, done in futures.items()}
    return Result(
        {
            "targets": [
                {
                    "target": target,
                    **output.build_result_fields(result.data, result.exit_code, result.errors),
                }
                for target, result in outcomes.items()
            ]
        },
        lambda: list(render_results(outcomes)),
        max(result.exit_code for result in outcomes.values()),
        tuple(error for result in outcomes.values() for error in result.errors),
    )


def wait_for_result(future: Future[Result]) -> Result:
    """The result for one target, its failure included."""
    try:
        return future.result()
    except VllmopsError as error:
        return Result(error.data, exit_code=error.exit_code, errors=(error,))
    except Exception as error:
        failure = VllmopsError("internal", f"unexpected {type(error).__name__}: {error}")
        return Result(None, exit_code=failure.exit_code, errors=(failure,))


def render_results(outcomes: dict[str, Result]) -> Iterator[RenderableType]:
    """The results for a person, each below the name of its server."""
    for number, (target, outcome) in enumerate(outcomes.items()):
        if number:
            yield ""
        yield output.style_text(f"== {target}", "bold")
        yield from outcome.text()
        for error in outcome.errors:
            yield output.style_text(f"error: {error.message}", "bold red")
            if error.hint:
                yield f"  hint: {error.hint}"
