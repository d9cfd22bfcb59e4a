"""The tokens of images, counted without an answer."""

from __future__ import annotations

from typing import Any

import pytest

from vllmops.demo.inputs import make_data_url, make_png

from .clients import base, connect
from .conftest import Live


@pytest.mark.parametrize("first", ["counted", "answered"])
def test_an_image_is_counted_as_for_an_answer(vision_server: Live, first: str) -> None:
    """An engine that was told of an image that was only counted would fail without it."""
    client = connect(base(vision_server))
    images = [make_data_url(make_png(9000 + (first == "counted"), pixels)) for pixels in (28, 56)]
    parts: list[Any] = [{"type": "input_image", "image_url": image} for image in images]
    given = [{"role": "user", "content": [{"type": "input_text", "text": "what?"}, *parts]}]

    def count_tokens() -> int:
        return int(
            client.responses.input_tokens.count(model="demo-vision", input=given).input_tokens
        )

    before = count_tokens() if first == "counted" else 0
    for _ in range(2):
        made = client.responses.create(model="demo-vision", input=given, max_output_tokens=2)
        assert made.usage.input_tokens == (before or count_tokens())
