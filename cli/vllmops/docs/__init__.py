"""The manual: pages of Markdown that are shipped, because a server room may have no internet.

``docs/WORD.md`` is a topic, ``docs/findings/CODE.md`` a finding, and in ``docs/errors/AREA.md``
each second-level heading is an error's code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

HEADING = re.compile(r"^## ", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """One page of the manual.

    Args:
        name: what ``vllmops help`` takes.
        kind: ``topic``, ``finding`` or ``error``.
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
    """Every page by its name: topics first, then findings, then errors, each in order."""
    root = files(__package__)
    found = [Page(stem(file), "topic", file.read_text()) for file in texts(root)]
    found += [Page(stem(file), "finding", file.read_text()) for file in texts(root / "findings")]
    for file in texts(root / "errors"):
        _, *sections = HEADING.split(file.read_text())
        found += [
            Page(section.partition("\n")[0].strip(), "error", f"# {section}")
            for section in sections
        ]
    return {page.name: page for page in found}


def texts(folder: Traversable) -> list[Traversable]:
    """The Markdown files of a folder, by name."""
    named = [file for file in folder.iterdir() if file.name.endswith(".md")]
    return sorted(named, key=lambda file: file.name)


def stem(file: Traversable) -> str:
    return file.name.removesuffix(".md")
