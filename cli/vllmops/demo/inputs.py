"""Inputs for the demo models, distinct by a number: images and sounds.

``python -m vllmops.demo.inputs 7`` prints the request body of a chat about image 7, for curl.
"""

from __future__ import annotations

import base64
import io
import json
import math
import random
import struct
import sys
import wave
import zlib
from typing import Any

IMAGE_PIXELS = 28
SAMPLE_RATE_HZ = 16_000


def make_png(seed: int, pixels: int = IMAGE_PIXELS) -> bytes:
    """A square RGB image of noise."""
    noise = random.Random(seed)  # noqa: S311 - no secret
    rows = b"".join(b"\0" + noise.randbytes(3 * pixels) for _ in range(pixels))

    def make_chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", pixels, pixels, 8, 2, 0, 0, 0)
    chunks = (
        make_chunk(b"IHDR", header),
        make_chunk(b"IDAT", zlib.compress(rows)),
        make_chunk(b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def make_data_url(image: bytes) -> str:
    """A PNG image as a URL that holds it."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def make_chat_request(
    seeds: list[int], text: str = "What is this?", **fields: Any
) -> dict[str, Any]:
    """A chat completion request about some images, one token long by default."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": make_data_url(make_png(seed))}} for seed in seeds
    ]
    content = [*parts, {"type": "text", "text": text}]
    message = {"role": "user", "content": content}
    return {"model": "demo-vision", "messages": [message], "max_tokens": 1, **fields}


def make_wav(seed: int, seconds: float = 1.0) -> bytes:
    """A tone, mono, 16 bits, of a pitch of its own."""
    pitch_hz = 100 + seed % 4000
    count = int(SAMPLE_RATE_HZ * seconds)
    wave_of = (math.sin(2 * math.pi * pitch_hz * n / SAMPLE_RATE_HZ) for n in range(count))
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE_HZ)
        file.writeframes(b"".join(struct.pack("<h", int(20_000 * value)) for value in wave_of))
    return out.getvalue()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(make_chat_request([int(word) for word in sys.argv[1:]])))
