"""The manual: pages of Markdown that are shipped, because a server room may have no internet.

``docs/WORD.md`` is a topic, ``docs/findings/CODE.md`` a finding. A section of ``docs/alerts.md`` is
an alert's page, too, and one of ``docs/errors/AREA.md`` an error's. The pages of stack signatures
come from their catalogue.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from ..diagnose.signatures import Signature, catalogue

HEADING = re.compile(r"^## ", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """One page of the manual.

    Args:
        name: what ``vllmops help`` takes.
        kind: ``topic``, ``finding``, ``alert`` or ``error``.
        text: Markdown, its title first.
    """

    name: str
    kind: str
    text: str

    @property
    def title(self) -> str:
        """The first line, without its marks."""
        return self.text.partition("\n")[0].lstrip("# ")


def pages() -> dict[str, Page]:
    """Every page by its name: topics first, then findings, alerts, errors, each in order."""
    root = files(__package__)
    all_pages = [Page(stem(file), "topic", file.read_text("utf-8")) for file in texts(root)]
    all_pages += [
        Page(stem(file), "finding", file.read_text("utf-8")) for file in texts(root / "findings")
    ]
    all_pages += [Page(f"stack.{each.id}", "finding", described(each)) for each in catalogue()]
    all_pages += sections(root / "alerts.md", "alert")
    for file in texts(root / "errors"):
        all_pages += sections(file, "error")
    return {page.name: page for page in all_pages}


def sections(file: Traversable, kind: str) -> list[Page]:
    """A page for each section, whose heading is its name."""
    _, *parts = HEADING.split(file.read_text("utf-8"))
    return [Page(part.partition("\n")[0].strip(), kind, f"# {part}") for part in parts]


def described(signature: Signature) -> str:
    """The page of a stack signature."""
    fixed = f"Fixed in vLLM {signature.fixed_in}." if signature.fixed_in else ""
    parts = [
        f"# stack.{signature.id}: {signature.title}",
        f"## What it means\n\n{sentence(signature.cause)} {fixed}".rstrip(),
        f"## How vllmops knows\n\nThe stacks show it. It is sure with this: {signature.sure}."
        + (f"\n\nIf nothing is stuck: {signature.work}." if signature.work else ""),
        f"## What to do\n\n{sentence(signature.next)}",
        "## Where it was reported\n\n" + "\n".join(f"- {url}" for url in signature.references),
    ]
    return "\n\n".join(parts) + "\n"


def sentence(text: str) -> str:
    """Text with a full stop; a command at its beginning keeps its case."""
    return f"{text if text.startswith('vllmops') else text[0].upper() + text[1:]}."


def texts(folder: Traversable) -> list[Traversable]:
    """The Markdown files of a folder, by name."""
    named = [file for file in folder.iterdir() if file.name.endswith(".md")]
    return sorted(named, key=lambda file: file.name)


def stem(file: Traversable) -> str:
    return file.name.removesuffix(".md")
