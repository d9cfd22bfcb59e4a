"""``vllmops help``: a page of the manual."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..docs import Page, load_pages
from ..support.errors import VllmopsError
from ..support.output import Json, Result, make_table, make_typer_app, print_result

if TYPE_CHECKING:
    from rich.console import RenderableType

app = make_typer_app()

WIDTH = 92  # columns; longer lines are hard to read
SIMILAR = 6  # names, at most
IMAGE = re.compile(r"!\[[^]]*\]\([^)]*\)\n*")
LINK = re.compile(r"\[([^]]*)\]\((?:[a-z.]+/)?([^)/:]+)\.md\)")


def complete_page_name(incomplete: str) -> list[tuple[str, str]]:
    """Names of pages and their titles, for completion."""
    return [
        (page.name, page.title)
        for page in load_pages().values()
        if page.name.startswith(incomplete)
    ]


@app.command("help", epilog="Example: vllmops help mm-cache.ghost-keys")
@print_result
def show_page(
    ctx: typer.Context,
    word: Annotated[
        str | None,
        typer.Argument(
            help="A topic, the name of an alert, or the code of a finding or an error.",
            autocompletion=complete_page_name,
        ),
    ] = None,
    *,
    json_: Json = False,
) -> Result:
    """Show a page of the manual.

    Without a word, list the topics.
    """
    manual = load_pages()
    if word is None:
        return Result(
            {
                "pages": [
                    {"name": p.name, "kind": p.kind, "title": p.title} for p in manual.values()
                ]
            },
            lambda: [make_topics_table(manual)],
        )
    known = {name.lower(): page for name, page in manual.items()}
    if (page := known.get(word.lower())) is None:
        root: Any = ctx.find_root().command
        near = [known[name].name for name in find_similar_names(word.lower(), list(known))]
        raise VllmopsError(
            "help.unknown",
            f"no page {word!r} in the manual" + (f"; similar: {', '.join(near)}" if near else ""),
            f"vllmops {word} --help" if word in root.commands else "vllmops help",
        )
    return Result(
        {"name": page.name, "kind": page.kind, "text": page.text}, lambda: render_page(page)
    )


def find_similar_names(word: str, known_names: Sequence[str]) -> list[str]:
    """Names that a word is part of, and those that are spelt nearly like it."""
    parts = [name for name in known_names if word in name]
    return list(dict.fromkeys((*parts, *difflib.get_close_matches(word, known_names))))[:SIMILAR]


def make_topics_table(manual: dict[str, Page]) -> RenderableType:
    """The topics, one per line."""
    listed = make_table("topic", "")
    for page in manual.values():
        if page.kind == "topic":
            listed.add_row(page.name, page.title)
    return listed


def render_page(page: Page) -> list[RenderableType]:
    """A page as a terminal shows it."""
    from rich.constrain import Constrain  # noqa: PLC0415
    from rich.markdown import Markdown  # noqa: PLC0415 - takes 50 ms to import

    text = LINK.sub(r"\1 (`vllmops help \2`)", IMAGE.sub("", page.text))
    return [Constrain(Markdown(text, hyperlinks=False), WIDTH)]
