"""What a bundle costs: memory for making and reading it, and time for hostile logs."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllmops.redaction.redactor import Redactor

from ..support.extent import EVERYTHING, programs, sample_cases

pytestmark = programs

MOST_MIB = 150
PART_MIB = 64 if EVERYTHING else 16  # some more than is kept
PARTS = ["log.txt", "supervisor.txt"][: 2 if EVERYTHING else 1]
# In a process of its own: a peak is a process's.
MEASURED = """
import re, sys
from pathlib import Path
from vllmops.bundle import bundle_file as bundle, parts as collecting, tar_archive as archive
from vllmops.rules import diagnosis as doctor
from vllmops.support.errors import VllmopsError

def mib(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

def make(folder):
    contents = collecting.BundleContents("demo", 1e9)
    for name in sys.argv[3:]:
        text = collecting.read_shortened_log(folder / "server.log")
        contents.pieces[name] = collecting.UnredactedPart(text, 0.1)
    contents.known_secrets = [f"known-secret-number-{n}-of-them" for n in range(30)]
    index = bundle.write_bundle(contents, folder / "b.tar.gz", redact_s=3600.0)[1]
    print(index.parts, file=sys.stderr)

def read(folder):
    try:
        doctor.diagnose_snapshot(bundle.load_bundle(folder / "b.tar.gz"))
    except VllmopsError as error:
        print(error.code, file=sys.stderr)

before = mib("VmRSS")
{"make": make, "read": read}[sys.argv[1]](Path(sys.argv[2]))
print(mib("VmHWM") - before)
"""


def peak(what: str, folder: Path) -> tuple[float, str]:
    """How many MiB more than at its start a process needs for it, and what it says."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, what, str(folder), *PARTS],
        capture_output=True,
        text=True,
        check=True,
        timeout=3600,
    )
    return float(done.stdout), done.stderr


def server_lines() -> bytes:
    drawn = random.Random(1)
    return b"".join(
        b"(APIServer pid=7) INFO 11-20 19:05:%02d [api.py:3] Received request cmpl-%032x: "
        b"prompt: 'tell me %x', params: SamplingParams(n=1, max_tokens=16), lora_request: None.\n"
        % (n % 60, drawn.getrandbits(128), drawn.getrandbits(800))
        for n in range(2000)
    )


LINES: dict[str, Callable[[], bytes]] = {
    "requests": server_lines,
    "no line ends": lambda: b"x" * (1 << 20),
    "line ends alone": lambda: b"\n" * (1 << 20),
    "other alphabets": lambda: (
        "(APIServer pid=7) INFO 11-20 19:05:14 [a.py:1] \U0001f600日本\n".encode() * 20_000
    ),
    "long lines": lambda: (b"api_key='" + b"a1" * (1 << 18) + b"\n") * 2,
}


@pytest.mark.parametrize("kind", sample_cases(LINES, 2))
def test_memory_for_big_logs(tmp_path: Path, kind: str) -> None:
    lines = LINES[kind]()
    for name in ("server.log", "server.log.1", "server.log.2"):
        with (tmp_path / name).open("wb") as file:
            for _ in range((PART_MIB << 20) // len(lines) + 1):
                file.write(lines)
        assert (tmp_path / name).stat().st_size >= PART_MIB << 20
    made, parts = peak("make", tmp_path)
    assert "log.txt" in parts
    assert made < MOST_MIB, f"{made:.0f} MiB for {kind}"
    (tmp_path / "server.log").unlink()


@pytest.mark.parametrize("command", sample_cases([("doctor",), ("stacks", "explain")], 2))
def test_memory_for_reading_what_unfolds(
    tmp_path: Path, command: tuple[str, ...], vllmops: Any
) -> None:
    """A part that is read, of almost any size: it is refused before it is in memory."""
    path = tmp_path / "b.tar.gz"
    size = 200 << 20
    with gzip.open(path, "wb", compresslevel=1) as file:
        for name, part in (("index.json", 2), ("server.json", size)):
            member = tarfile.TarInfo(name)
            member.size = part
            file.write(member.tobuf())
            if part == size:
                for _ in range(size >> 20):
                    file.write(b"[" * (1 << 20))
            else:
                file.write(b"{}" + bytes(510))
        file.write(bytes(10240))
    needed, words = peak("read", tmp_path)
    assert "bundle.damaged" in words
    assert needed < MOST_MIB, f"{needed:.0f} MiB"
    answer = vllmops(*command, str(path), "--json")
    assert answer.error["code"] == "bundle.damaged"


# -- time ------------------------------------------------------------------------------------

HOSTILE: dict[str, Callable[[int], str]] = {
    "no line end": lambda n: "x" * n,
    "quotes": lambda n: "'" * n,
    "double quotes": lambda n: '"' * n,
    "brackets": lambda n: "[" * n,
    "slashes": lambda n: "\\" * n,
    "escaped quotes": lambda n: '\\"' * n,
    "names": lambda n: "api_key=" * n,
    "names and quotes": lambda n: "token='" * n,
    "names and brackets": lambda n: "token=[" * n,
    "names in JSON": lambda n: '{"token":' * n,
    "capitals": lambda n: "A_KEY" * n,
    "users": lambda n: "://a:" * n,
    "percent": lambda n: "%3D" * n,
    "base64": lambda n: "c2VjcmV0" * n,
    "tokens": lambda n: "hf_sk-eyJ" * n,
    "Stripe's": lambda n: "sk_live_" * n,
    "JWTs": lambda n: "eyJaaaaaaaaa." * n,
    "private keys": lambda n: "-----BEGIN PRIVATE KEY-----" * n,
    "sentences": lambda n: "password is " * n,
    "sentences for": lambda n: "password for a " * n,
    "secret access": lambda n: "secret access " * n,
    "prompts": lambda n: "prompt: '" * n,
    "prompts in brackets": lambda n: "prompt: [" * n,
    "exceptions": lambda n: "ValueError: " + "'a b c d " * n,
    "tags": lambda n: "<password " * n,
    "headers": lambda n: "Bearer " * n,
    "curl": lambda n: "curl -s " * n,
    "docker": lambda n: "docker run " * n,
    "pgpass": lambda n: "a:5432:" * n,
    "options": lambda n: "--api-key " * n,
    "pairs": lambda n: "name: API_KEY " * n,
    "colons": lambda n: "a:" * n,
    "hashes": lambda n: "4dfb04f3173c1f2e" * n,
    "webhooks": lambda n: "https://a.com/a/" * n,
    "hooks": lambda n: "https://a/hooks" * n,
    "fragments": lambda n: "#a=b&" * n,
    "signing": lambda n: "signing " * n,
    "lines": lambda n: "\n" * n,
    "lines of names": lambda n: "api_key:\n" * n,
    "lines of keys": lambda n: "-----BEGIN PRIVATE KEY-----\n" * n,
    "entity": lambda n: "token=&quot;" * n,
}


@pytest.mark.parametrize("name", sample_cases(HOSTILE, 3))
def test_ten_times_as_long_takes_about_ten_times_as_long(name: str) -> None:
    write = HOSTILE[name]
    redactor = Redactor(["planted-secret", "another-of-them"])

    large = 1_000_000 if EVERYTHING else 100_000

    def took(size: int) -> float:
        text = write(size // len(write(1)))
        began = time.process_time()
        redactor.redact_server_log(text)
        return time.process_time() - began

    before = max(min(took(large // 10) for _ in range(2)), 0.02)
    now = took(large)
    assert now < 20 * before, f"{before:.3f} s, {now:.3f} s"
    assert now < 10


def test_lines_in_json_are_of_a_bounded_length() -> None:
    shown = json.dumps(Redactor().redact_data({"why": "password='" + "x" * 1_000_000}))
    assert len(shown) < 1000
