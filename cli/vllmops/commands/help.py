"""``vllmops help``: a page of the manual."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated

import typer

from ..docs import Page, pages
from ..errors import VllmopsError
from ..output import Json, Result, command, table, typer_app

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer_app()

WIDTH = 92  # columns; longer lines are hard to read


def names(incomplete: str) -> list[tuple[str, str]]:
    """Names of pages and their titles, for completion."""
    return [
        (page.name, page.title) for page in pages().values() if page.name.startswith(incomplete)
    ]


@app.command("help", epilog="Example: vllmops help mm-cache.ghost-keys")
@command
def help_(
    word: Annotated[
        str | None,
        typer.Argument(
            help="A topic, the name of an alert, or the code of a finding or an error.",
            autocompletion=names,
        ),
    ] = None,
    *,
    json_: Json = False,
) -> Result:
    """Show a page of the manual.

    Without a word, list the topics.
    """
    manual = pages()
    if word is None:
        return Result(
            {
                "pages": [
                    {"name": p.name, "kind": p.kind, "title": p.title} for p in manual.values()
                ]
            },
            lambda: [topics(manual)],
        )
    known = {name.lower(): page for name, page in manual.items()}
    if (page := known.get(word.lower())) is None:
        near = [known[w].name for w in difflib.get_close_matches(word.lower(), known, n=3)]
        raise VllmopsError(
            "help.unknown",
            f"no page {word!r} in the manual" + (f"; similar: {', '.join(near)}" if near else ""),
            "vllmops help",
        )
    return Result({"name": page.name, "kind": page.kind, "text": page.text}, lambda: shown(page))


def topics(manual: dict[str, Page]) -> RenderableType:
    """The topics, one per line."""
    listed = table("topic", "")
    for page in manual.values():
        if page.kind == "topic":
            listed.add_row(page.name, page.title)
    return listed


def shown(page: Page) -> list[RenderableType]:
    """A page as a terminal shows it."""
    from rich.constrain import Constrain  # noqa: PLC0415
    from rich.markdown import Markdown  # noqa: PLC0415 - takes 50 ms to import

    return [Constrain(Markdown(page.text, hyperlinks=False), WIDTH)]
