"""Takes an issue's text apart: what each person wrote is a text of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from ...support.lazy_patterns import compile_lazily

# As `gh issue view --comments` prints it, and as a page that was copied shows it.
AUTHOR = compile_lazily(
    r"\n(?:author:\t.*\n(?:[a-z ]+:\t.*\n){0,20}--(?=\n)"
    r"|#{0,4} ?\**@?[\w-]{1,39}\** (?:\([^)\n]*\) )?(?:opened|commented)\b[^\n]{0,60}$)",
    re.MULTILINE,
)


def split_issue_text(text: str) -> list[str]:
    """The texts of an issue and its comments, in their order; the whole text if it is no issue."""
    start = text.lstrip("\ufeff \r\n\t")
    if start[:1] in {"{", "["}:
        try:
            bodies = [part for part in _list_bodies(json.loads(start)) if part.strip()]
        except (ValueError, RecursionError):
            bodies = []
        return bodies or [text]
    parts = [part for part in AUTHOR.split(f"\n{text}") if part and part.strip()]
    return parts if len(parts) > 1 else [text]


def _list_bodies(document: object) -> Iterator[str]:
    """The texts in GitHub's JSON: an issue with its comments, or a list of comments."""
    if isinstance(document, list):
        for each in document:
            yield from _list_bodies(each)
    elif isinstance(document, dict):
        body = document.get("body")
        if isinstance(body, str):
            title = document.get("title")
            yield f"{title}\n\n{body}" if isinstance(title, str) else body
        for key in ("comments", "nodes", "issue", "data", "repository", "items"):
            if isinstance(document.get(key), (dict, list)):
                yield from _list_bodies(document[key])
