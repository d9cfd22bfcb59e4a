"""Regular expressions that are compiled when a text first needs them: most texts need few."""

from __future__ import annotations

import re
from typing import Any, Final, cast

# What `float` reads; `[\d.]+` also fits 1.2.3, which it does not read.
DECIMAL: Final = r"\d+(?:\.\d+)?"


class _LazyPattern:
    """Stands for a pattern, and has its methods."""

    def __init__(self, text: str, flags: int) -> None:
        self._made_of = text, flags

    def __getattr__(self, name: str) -> Any:
        value = getattr(re.compile(*self._made_of), name)
        setattr(self, name, value)
        return value


def compile_lazily(text: str, flags: int = 0) -> re.Pattern[str]:
    """A pattern, as `re.compile` makes it; what is wrong with it shows at its first use."""
    return cast("re.Pattern[str]", _LazyPattern(text, flags))
