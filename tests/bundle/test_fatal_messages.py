"""Messages that ended a thread of an engine: whole where asked for, without prompts elsewhere."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllmops.bundle import bundle_file
from vllmops.bundle.fatal_messages import ProcessFatalMessage, redact_messages
from vllmops.bundle.parts import BundleContents, UnredactedPart
from vllmops.model.fatal_messages import MessageFrame

SCHEMA = {"a secret": {"type": "string"}}
SAMPLING = {
    "temperature": 0.5,
    "_eos_token_id": 1,
    "structured_outputs": {"json": {"schema": SCHEMA}},
    "stop": ["x"],
}
REQUEST = ["chatcmpl-1", [1, 2, 3], msgspec.msgpack.Ext(4, b"pixels"), SAMPLING, None]
WHOLE = msgspec.msgpack.encode(REQUEST)
FRAMES = (
    MessageFrame(size=1, head=b"\0"),
    MessageFrame(size=len(WHOLE), head=WHOLE),
    MessageFrame(size=9_000_000, head=b"pixels"),
    MessageFrame(size=1, head=b"\xc1"),
)
MESSAGE = ProcessFatalMessage(
    process="engine 20",
    thread="input thread",
    failed_at=1000.0,
    error="AssertionError: Expected a cached item for mm_hash='4dfb'",
    requests=("chatcmpl-1",),
    frames=FRAMES,
)


@pytest.mark.parametrize("redact", [True, False])
def test_a_message_is_in_a_bundle(tmp_path: Path, *, redact: bool) -> None:
    contents = BundleContents(
        "demo", 1000.0, pieces={"messages.jsonl": UnredactedPart([MESSAGE], 0.1)}
    )
    path, index = bundle_file.write_bundle(contents, tmp_path / "demo.tar.gz", redact=redact)
    assert [part.name for part in index.parts] == ["messages.jsonl"]
    with tarfile.open(path) as archive:
        name = next(name for name in archive.getnames() if name.endswith("messages.jsonl"))
        file = archive.extractfile(name)
        assert file
        (line,) = file.read().splitlines()
    found: dict[str, Any] = json.loads(line)
    assert found["error"] == MESSAGE.error
    if not redact:
        again = msgspec.json.decode(line, type=ProcessFatalMessage)
        assert again == MESSAGE
        return
    assert [(frame["size"], frame["head"]) for frame in found["frames"]] == [
        (frame.size, "") for frame in FRAMES
    ]
    sampling = {
        "temperature": 0.5,
        "_eos_token_id": 1,
        "structured_outputs": {"json": "map of 1"},
        "stop": ["str of 1"],
    }
    assert found["shapes"] == [
        0,
        ["str of 10", "3 numbers", "Ext of 6", sampling, None],
        "cut off",
        "no msgpack",
    ]


@pytest.mark.parametrize("key", ["a secret", "x" * 50, 5])
def test_redact_messages_hides_keys_that_may_be_names(key: object) -> None:
    (shown,) = redact_messages(
        [
            msgspec.structs.replace(
                MESSAGE,
                frames=(MessageFrame(size=len(one), head=one),),
            )
            for one in [msgspec.msgpack.encode({key: 1})]
        ]
    )
    assert shown.shapes == ("map of 1",)
