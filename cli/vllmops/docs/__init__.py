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

from ..rules.stacks.signatures import Signature, load_signatures

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


def load_pages() -> dict[str, Page]:
    """Every page by its name: topics first, then findings, alerts, errors, each in order."""
    root = files(__package__)
    all_pages = [
        Page(strip_md_suffix(file), "topic", file.read_text("utf-8"))
        for file in list_markdown_files(root)
    ]
    all_pages += [
        Page(strip_md_suffix(file), "finding", file.read_text("utf-8"))
        for file in list_markdown_files(root / "findings")
    ]
    all_pages += [
        Page(f"stack.{each.id}", "finding", render_signature_page(each))
        for each in load_signatures()
    ]
    all_pages += load_section_pages(root / "alerts.md", "alert")
    for file in list_markdown_files(root / "errors"):
        all_pages += load_section_pages(file, "error")
    return {page.name: page for page in all_pages}


def load_section_pages(file: Traversable, kind: str) -> list[Page]:
    """A page for each section, whose heading is its name."""
    _, *parts = HEADING.split(file.read_text("utf-8"))
    return [Page(part.partition("\n")[0].strip(), kind, f"# {part}") for part in parts]


def render_signature_page(signature: Signature) -> str:
    """The page of a stack signature."""
    fixed = f"Fixed in vLLM {signature.fixed_in}." if signature.fixed_in else ""
    parts = [
        f"# stack.{signature.id}: {signature.title}",
        f"## What it means\n\n{format_sentence(signature.cause)} {fixed}".rstrip(),
        "## How vllmops knows\n\nThe stacks show it. It is sure with this: "
        f"{signature.confirmation}."
        + (f"\n\nIf nothing is stuck: {signature.work}." if signature.work else ""),
        f"## What to do\n\n{format_sentence(signature.next_step)}",
        "## Where it was reported\n\n" + "\n".join(f"- {url}" for url in signature.references),
    ]
    return "\n\n".join(parts) + "\n"


def format_sentence(text: str) -> str:
    """Text with a full stop; a command at its beginning keeps its case."""
    return f"{text if text.startswith('vllmops') else text[0].upper() + text[1:]}."


def list_markdown_files(folder: Traversable) -> list[Traversable]:
    """The Markdown files of a folder, by name."""
    named = [file for file in folder.iterdir() if file.name.endswith(".md")]
    return sorted(named, key=lambda file: file.name)


def strip_md_suffix(file: Traversable) -> str:
    return file.name.removesuffix(".md")
