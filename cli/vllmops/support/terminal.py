"""Rich's console, with no trust in what it is given to print."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from .streams import make_printable


class Terminal(Console):
    """A console that reads no markup in strings, and lets only its own escape sequences out."""

    def render_str(self, text: str, **how: Any) -> Text:
        """A string as it is measured and rendered."""
        return super().render_str(make_printable(text), **how)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render; texts before they are laid out, and whatever others come out with."""
        if isinstance(renderable, Text) and not renderable.plain.isprintable():
            renderable = renderable.copy()
            renderable.plain = make_printable(renderable.plain)
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(make_printable(segment.text), segment.style)
