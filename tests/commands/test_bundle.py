"""``vllmops bundle``, with a stand-in for vLLM (see supervision/standin.py)."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllmops.bundle import bundle_file
from vllmops.bundle import parts as collecting
from vllmops.bundle.parts import (
    BundleCollector,
    collect_contents,
    ignore_progress,
    make_examination_options,
    read_server_log,
)
from vllmops.collect.machine import nccl_ras
from vllmops.collect.machine.processes import Process
from vllmops.model.roles import Role
from vllmops.observe import server_snapshot
from vllmops.servers.discovery import Server, resolve_server
from vllmops.support.errors import VllmopsError
from vllmops_responses.keys import keyring_file

from ..support.commands import background
from ..support.waiting import until

OTHER = Path(__file__).parents[1] / "redaction/logs/other.log"
NCCL = Path(__file__).parent.parent / "support" / "nccl_ras.py"
KEY = "0123456789abcdef" * 4
SECRETS = {
    "VLLM_API_KEY": "PLANTED-key-of-the-server",
    "HF_TOKEN": "hf_PLANTEDplantedPLANTEDplanted",
    "MY_STORE": "postgresql://vllm:PLANTED-password@db/x",
    "SOMETHING": "PLANTED of no known kind",
}


def parts(path: Path) -> dict[str, str]:
    with tarfile.open(path) as found:
        return {item.name: found.extractfile(item).read().decode() for item in found}  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where bundles come that are given no place."""
    place = home / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setattr(collecting, "JUDGE_S", 60.0)  # a busy machine is no failure
    yield place
    # Before the state directory goes.
    os.chdir("/")


def test_bundle_holds_all_evidence_without_secrets(
    lab: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_RESPONSES_STATE_SIGNING_KEY", KEY)
    env = [word for name, value in SECRETS.items() for word in ("--env", f"{name}={value}")]
    words = ("--", "--api-key", "PLANTED-argument", "PLANTED-second", "--max-num-seqs", "16")
    record = lab.serve("a", *env, *words, says=str(OTHER))
    assert lab.vllmops("memory", "record", "--interval", "0.1", "--duration", "0.3").code == 0
    answer = lab.vllmops("bundle", "--timeout", "60", "--json")
    assert answer.code == 0, answer
    (path,) = folder.iterdir()
    assert Path(answer.data["file"]).absolute() == path
    assert path.name.startswith("vllmops-bundle-a-")
    assert path.name.endswith("Z.tar.gz")
    assert path.stat().st_mode & 0o777 == 0o600
    found = parts(path)
    for name, text in found.items():
        for word in ("PLANTED", "UExBTlRFR", KEY):
            assert word not in text, name
    pids = {process.pid for process in record.processes}
    # Its supervisor may have had nothing to say.
    assert set(found) - {"supervisor.txt"} == {
        *("index.json", "doctor.json", "doctor.txt", "server.json", "stacks.jsonl"),
        *("memory.jsonl", "metrics.txt", "log.txt", "configuration.json"),
        *("versions.json", *(f"proc/{pid}.txt" for pid in pids)),
    }
    index = json.loads(found["index.json"])
    assert [item["name"] for item in index["parts"]] == list(found)[1:]
    whose = {item["name"]: item["process"] for item in index["parts"] if item["process"]}
    assert whose == {f"proc/{p.pid}.txt": p.role for p in record.processes}
    missing = {item["name"]: item["why"] for item in index["missing"]}
    assert "No module named vllm.collect_env" in missing["collect_env.txt"]
    assert any("has no agent" in why for why in missing.values())
    assert index["redactions"]["environment variable"] > len(SECRETS)
    assert index["redactions"]["prompt or answer"] > 5
    assert answer.data["redactions"] == index["redactions"]
    configuration = json.loads(found["configuration.json"])
    assert set(SECRETS) <= set(configuration["environment"])
    assert configuration["command"][-5:] == [
        "--api-key",
        *["[redacted]"] * 2,
        *("--max-num-seqs", "16"),
    ]
    assert json.loads(found["versions.json"])["kernel"] == os.uname().release
    assert "vllm:num_requests_running" in found["metrics.txt"]
    assert "kept, what comes after" in found["log.txt"]
    assert found["doctor.txt"].startswith(f"a at {record.url}, vLLM ")
    # Of this machine it may find anything.
    findings = json.loads(found["doctor.json"])["findings"]
    assert {item["code"].partition(".")[0] for item in findings} <= {"machine"}
    assert len(found["stacks.jsonl"].splitlines()) == 3
    for pid in pids:
        for word in ("== status", "Threads:", "== limits", "== cgroup", "== smaps_rollup", "Pss:"):
            assert word in found[f"proc/{pid}.txt"]
    # And it is read as a server is.
    assert lab.vllmops("doctor", str(path), "--json").data["findings"] == findings
    assert lab.vllmops("stacks", "explain", str(path), "--json").code == 0
    assert len(lab.vllmops("memory", "report", str(path), "--json").data["samples"]) >= 2
    assert lab.vllmops("cache", "inspect", str(path), "--json").error["code"] == "bundle.no-caches"


def test_bundle_redacts_secrets_that_files_hold(
    lab: Any, folder: Path, tmp_path: Path, model: Path
) -> None:
    """Keys of the ring, the admin token, vLLM's configuration file: however a log has them."""
    ring, token, configured = tmp_path / "ring.json", tmp_path / "admin", tmp_path / "vllm.yaml"
    assert lab.vllmops("keys", "add", "--keyring", str(ring)).code == 0
    (key,) = (item.secret.reveal() for item in keyring_file.load_keyring(ring).keys)
    token.write_text("PLANTEDadmin" + "x7" * 20)
    token.chmod(0o600)
    configured.write_text("port: 1\napi-key: PLANTED of several words\n")
    says = tmp_path / "says"
    coded = base64.b64encode(b"for PLANTED of several words").decode()
    says.write_text(
        f"vllm: loaded {key.hex()} {key.hex().upper()} {base64.b64encode(key).decode()}\n"
        f"uvicorn: {token.read_text()} and PLANTED of several words, {coded}\n"
    )
    env = [f"--env=VLLMOPS_KEYRING={ring}", f"--env=VLLMOPS_ADMIN_TOKEN_FILE={token}"]
    lab.serve("a", *env, "--", "--config", str(configured), says=str(says))
    answer = lab.vllmops("bundle", "--json", "--timeout", "60")
    path = Path(answer.data["file"])
    assert "known secrets" not in {item["name"] for item in answer.data["missing"]}
    for name, text in parts(path).items():
        for word in ("PLANTED", coded[:-8], key.hex(), key.hex().upper(), token.read_text()[14:]):
            assert word not in text, name


def test_bundle_holds_the_answers_of_nccl(
    lab: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = lab.serve("a")
    (engine,) = (process.pid for process in record.processes if process.role == Role.ENGINE)
    answers = []
    for number, count in enumerate((8, 9)):
        ranks = [{"rank": 0, "pid": engine, "collective_counts": {"AllReduce": count}}]
        answers.append(json.dumps({"communicators": [{"hash": "0x1", "ranks": ranks}]}))
        (folder.parent / f"{number}").write_text(answers[-1])
    files = [str(folder.parent / f"{number}") for number, _ in enumerate(answers)]
    service = subprocess.Popen(
        [sys.executable, str(NCCL), "json", *files], stdout=subprocess.PIPE, text=True
    )
    assert service.stdout
    port = int(service.stdout.readline())
    monkeypatch.setattr(nccl_ras, "ANSWER_S", 60.0)  # a busy machine is no failure
    monkeypatch.setattr(
        nccl_ras,
        "find_service_addresses",
        lambda pid: [("127.0.0.1", port)] if pid == engine else [],
    )
    try:
        answer = lab.vllmops("bundle", "--timeout", "60", "--json")
    finally:
        service.kill()
        service.communicate()
    assert answer.code == 0, answer
    kept = bundle_file.load_bundle(Path(answer.data["file"])).ras
    assert [(capture.pid, capture.port, capture.text) for capture in kept] == [
        (engine, port, text) for text in answers
    ]
    assert kept[0].at_s < kept[1].at_s


def test_bundle_prints_a_preview_and_a_summary(lab: Any, folder: Path) -> None:
    lab.serve("a", "--env", "HF_TOKEN=hf_PLANTED")
    preview = lab.vllmops("bundle", "--dry-run", columns=60)
    assert preview.code == 0
    for word in ("index.json", "stacks.jsonl", "collect_env.txt", "proc/"):
        assert word in preview.out
    assert max(map(len, preview.out.splitlines())) <= 60
    listed = lab.vllmops("bundle", "--dry-run", "--json").data
    assert [item["name"] for item in listed["parts"]][:2] == ["index.json", "doctor.txt"]
    assert list(folder.iterdir()) == []
    answer = lab.vllmops("bundle", "-o", "b.tar.gz", "--no-redact", "--timeout", "60")
    assert answer.code == 0, answer
    assert "looking at 3 processes" in answer.err
    shown = " ".join(answer.out.split())
    assert "doctor: " in shown
    assert "not captured: collect_env.txt: " in shown
    assert "Nothing is redacted: it may contain keys, tokens and prompts." in shown
    assert "b.tar.gz: " in shown
    assert "hf_PLANTED" in parts(folder / "b.tar.gz")["configuration.json"]
    again = lab.vllmops("bundle", "-o", "b.tar.gz", "--json")
    assert (again.code, again.error["code"]) == (2, "unconfirmed")
    assert "--force" in again.error["hint"]
    assert lab.vllmops("bundle", "-o", "b.tar.gz", "--force", "--timeout", "60").code == 0
    assert "[redacted]" in parts(folder / "b.tar.gz")["configuration.json"]
    nowhere = lab.vllmops("bundle", "-o", "none/b.tar.gz", "--json")
    assert (nowhere.code, nowhere.error["code"]) == (1, "bundle.not-written")


def test_interrupted_it_keeps_what_there_is(
    lab: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.serve("a")
    reached, wait = folder.parent / "reached", BundleCollector.wait_for_task

    def wait_until_interrupted(self: BundleCollector, task: Any, until_s: float) -> None:
        """Once there is what the test looks for, wait until somebody interrupts."""
        if not reached.exists():
            until(lambda: self.looking.server_samples)
            for name in ("log.txt", "configuration.json"):
                self.tasks[name].thread.join()
            reached.touch()
            self.stop.wait(600)
        wait(self, task, until_s)

    monkeypatch.setattr(BundleCollector, "wait_for_task", wait_until_interrupted)
    running = background("bundle", "-o", "b.tar.gz")
    assert running.stderr is not None
    assert "looking at" in running.stderr.readline()
    until(reached.exists)
    for _ in range(3):  # as people do
        running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert "what was captured until then is in b.tar.gz" in " ".join(err.split())
    found = parts(folder / "b.tar.gz")
    index = json.loads(found["index.json"])
    assert index["interrupted"]
    assert "interrupted" in {item["why"] for item in index["missing"]}
    assert {"log.txt", "configuration.json", "server.json"} <= set(found)
    assert bundle_file.load_bundle(folder / "b.tar.gz").samples
    assert "log.txt" in out


def test_whatever_hangs_it_ends_in_time(
    lab: Any, folder: Path, patience: pytest.MonkeyPatch
) -> None:
    """All processes stopped: nothing answers, and py-spy waits for each of them."""
    patience.undo()
    record = lab.serve("a")
    for process in record.processes:
        lab.kill(process.pid, signal.SIGSTOP)
    answer = lab.vllmops("bundle", "--timeout", "6", "--json")
    for process in record.processes:
        lab.kill(process.pid, signal.SIGCONT)
    assert answer.code == 0, answer
    codes = {item["code"] for item in answer.data["findings"]}
    assert "process.stopped" in codes
    missing = {item["name"]: item["why"] for item in answer.data["missing"]}
    assert "Timeout" in missing["metrics.txt"]
    seen = bundle_file.load_bundle(Path(answer.data["file"]))
    assert {state.state for look in seen.samples for state in look.processes} == {"T"}
    found = parts(Path(answer.data["file"]))
    assert all("T (stopped)" in text for name, text in found.items() if "proc/" in name)


def test_a_server_that_is_over_has_a_log(lab: Any, folder: Path) -> None:
    lab.serve("a", says=str(OTHER))
    assert lab.vllmops("stop", "a", "--force").code == 0
    answer = lab.vllmops("bundle", "-t", "a", "-o", str(folder / "b.tar.gz"), "--json")
    assert answer.code == 0, answer
    found = parts(folder / "b.tar.gz")
    assert "kept, what comes after" in found["log.txt"]
    assert "PLANTED" not in "".join(found.values())
    assert json.loads(found["configuration.json"])["record"]["state"] == "stopped"
    assert "stacks.jsonl" in {item["name"] for item in answer.data["missing"]}
    assert lab.vllmops("doctor", str(folder / "b.tar.gz")).code == 0


def test_the_log_of_a_server_that_others_started(tmp_path: Path) -> None:
    with (tmp_path / "nohup.out").open("wb") as file:
        for out in (file, subprocess.PIPE):
            popen = subprocess.Popen(
                [sys.executable, "-c", "print('kept', flush=True); input()"],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.DEVNULL,
            )
            server = Server(name=None, processes=(Process(Role.API, popen.pid, 0),))
            try:
                if out is file:
                    while not (tmp_path / "nohup.out").stat().st_size:
                        time.sleep(0.01)
                    assert read_server_log(server) == "kept"
                else:
                    with pytest.raises(VllmopsError) as caught:
                        read_server_log(server)
                    assert "writes to no file" in caught.value.message
            finally:
                popen.communicate()


def test_collector_takes_the_snapshot_before_other_parts(lab: Any, folder: Path) -> None:
    """As a watch has it, which may not want the rest."""
    lab.serve("a")
    server = resolve_server("a")
    looking = server_snapshot.Examination(server, make_examination_options(40.0), ignore_progress)
    collecting = BundleCollector(looking, 60.0, 60.0, ignore_progress, threading.Event())
    seen = collecting.take_snapshot(snapshot_only=True)
    assert set(collecting.tasks) == {"server.json"}
    path, index = bundle_file.write_bundle(
        collecting.collect_contents(), folder / "a.tar.gz", redact=False
    )
    assert bundle_file.load_bundle(path) == seen
    assert {"log.txt", "metrics.txt"} <= {item.name for item in index.parts}


def test_once_it_is_not_wanted_any_more(lab: Any) -> None:
    lab.serve("a")
    stop = threading.Event()
    stop.set()
    contents = collect_contents(resolve_server("a"), timeout_s=600, collect_env_s=600, stop=stop)
    assert contents.interrupted
    assert contents.seconds < 300  # it has waited for nothing
