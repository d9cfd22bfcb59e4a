import base64
import io
import json
import subprocess
import sys
import wave
import zlib

import pytest
from PIL import Image

from vllmops.demo.inputs import IMAGE_PIXELS, SAMPLE_RATE_HZ, make_chat_request, make_png, make_wav


def test_an_image_is_one_that_others_can_read() -> None:
    image = Image.open(io.BytesIO(make_png(1)))
    image.load()
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (IMAGE_PIXELS, IMAGE_PIXELS))
    assert Image.open(io.BytesIO(make_png(1, pixels=7))).size == (7, 7)


def test_images_differ_by_their_number_alone() -> None:
    pixels = [Image.open(io.BytesIO(make_png(seed))).tobytes() for seed in range(50)]
    assert len({zlib.crc32(item) for item in pixels}) == 50
    assert make_png(3) == make_png(3)


def test_a_sound_is_as_long_as_asked_for() -> None:
    with wave.open(io.BytesIO(make_wav(1, seconds=0.5))) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        assert file.getframerate() == SAMPLE_RATE_HZ
        assert file.getnframes() == SAMPLE_RATE_HZ // 2


def test_sounds_differ_by_their_number_alone() -> None:
    assert len({make_wav(seed, seconds=0.1) for seed in range(50)}) == 50
    assert make_wav(3) == make_wav(3)


@pytest.mark.parametrize("seeds", [[7], [1, 2, 1]])
def test_a_chat_is_about_its_images_in_order(seeds: list[int]) -> None:
    body = make_chat_request(seeds, "hi", max_tokens=5)
    *images, text = body["messages"][0]["content"]
    sent = [base64.b64decode(item["image_url"]["url"].partition(",")[2]) for item in images]
    assert sent == [make_png(seed) for seed in seeds]
    assert text == {"type": "text", "text": "hi"}
    assert body["max_tokens"] == 5


def test_the_module_prints_a_request_for_curl() -> None:
    words = [sys.executable, "-m", "vllmops.demo.inputs", "7"]
    printed = subprocess.run(words, capture_output=True, check=True, timeout=600).stdout
    assert json.loads(printed) == make_chat_request([7])
