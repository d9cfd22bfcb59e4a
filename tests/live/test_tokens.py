"""The tokens of images, counted without an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllmops.demo.inputs import png, url

from ..support.extent import EVERYTHING
from ..support.versions import INSTALLED, RUN
from .clients import base, connect
from .conftest import Cli, Live, code_of


@pytest.fixture(scope="module", params=[INSTALLED, *(RUN if EVERYTHING else ())])
def vision(cli: Cli, code: Callable[[str], Path], request: pytest.FixtureRequest) -> Iterator[Live]:
    """The vision server that tests share, or one with the code of another version."""
    if request.param == INSTALLED:
        yield request.getfixturevalue("vision_server")
        return
    made = cli.serve("old-vision", "--demo", "vision", *code_of(cli, code(request.param)))
    try:
        yield made
    finally:
        cli("stop", made.name, "--force")


@pytest.mark.parametrize("first", ["counted", "answered"])
def test_an_image_is_counted_as_for_an_answer(vision: Live, first: str) -> None:
    """An engine that was told of an image that was only counted would fail without it."""
    client = connect(base(vision))
    images = [url(png(9000 + (first == "counted"), pixels)) for pixels in (28, 56)]
    parts: list[Any] = [{"type": "input_image", "image_url": image} for image in images]
    given = [{"role": "user", "content": [{"type": "input_text", "text": "what?"}, *parts]}]

    def counted() -> int:
        return int(
            client.responses.input_tokens.count(model="demo-vision", input=given).input_tokens
        )

    before = counted() if first == "counted" else 0
    for _ in range(2):
        made = client.responses.create(model="demo-vision", input=given, max_output_tokens=2)
        assert made.usage.input_tokens == (before or counted())
