"""Pods as targets: the real client of Kubernetes, and a real server of its port forward."""

from __future__ import annotations

import os
import resource
import socket
import stat
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest

from vllmops.collect.http import kubernetes_forward, vllm_client
from vllmops.model.targets import Pod, parse_target

from ...support import commands
from ...support.children import Spawn
from ...support.cluster import TOKEN, Cluster
from ...support.commands import Vllmops
from ...support.extent import EVERYTHING
from ...support.fleet import Fleet
from ...support.forking import Forking
from ...support.waiting import patiently


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Commands are forks of a process that has the client: its import takes seconds.

    The folder has the client's configuration, whose place it reads from the environment once.
    """
    place = tmp_path_factory.mktemp("configuration")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(place / "kubeconfig"))
        kube_config = import_module("kubernetes.config.kube_config")
        patch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", os.environ["KUBECONFIG"])
        import_module("kubernetes.client")
        import_module("kubernetes.stream")
        # Nor is a server away that is slow.
        asking = (
            vllm_client.is_healthy,
            vllm_client.fetch_health,
            vllm_client.fetch_health_status,
            vllm_client.fetch_status_code,
            vllm_client.fetch_metrics,
        )
        patiently(patch, "timeout_s", *asking)
        forking = Forking(commands.become_clean_command)
        patch.setattr(commands, "get_fork_server", lambda: forking)
        yield place
        forking.close()


@pytest.fixture
def fleet(spawn: Spawn, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(spawn, tmp_path)
    yield made
    made.kill()


@pytest.fixture
def cluster(fleet: Fleet) -> Iterator[Cluster]:
    port = urlsplit(fleet.url).port
    assert port is not None
    made = Cluster(("inference", "vllm-0"), port)
    yield made
    made.stop()


def test_pod_target_is_parsed() -> None:
    text = "k8s:inference/vllm-0"
    assert parse_target(text) == Pod(text, "inference", "vllm-0", 8000)
    assert parse_target(f"{text}:9000") == Pod(f"{text}:9000", "inference", "vllm-0", 9000)


def test_a_server_in_a_pod(vllmops: Vllmops, fleet: Fleet, cluster: Cluster, folder: Path) -> None:
    environment = cluster.configuration(folder)
    target = ("-t", "k8s:inference/vllm-0:8123", "--admin-token", str(fleet.token), "--json")
    every = (("ps",), ("status",), ("cache", "inspect"), ("stacks", "dump"), ("doctor",))
    for words in every if EVERYTHING else every[-1:]:
        answer = vllmops(*words, *target, env=environment)
        assert answer.code == 0, answer
    assert answer.data["server"] == "k8s:inference/vllm-0:8123"
    (row,) = vllmops("ps", *target, env=environment).data["instances"]
    assert (row["state"], {p["role"]: p["pid"] for p in row["processes"]}) == ("ready", fleet.pids)
    assert vllmops("wait", "-t", target[1], "--timeout", "60", env=environment).code == 0
    paths = {(urlsplit(path).path, urlsplit(path).query) for path, _ in cluster.asked}
    assert paths == {("/api/v1/namespaces/inference/pods/vllm-0/portforward", "ports=8123")}
    assert {given for _, given in cluster.asked} == {f"Bearer {TOKEN}"}
    both = vllmops("ps", *target, "-t", fleet.url, env=environment).data["targets"]
    assert [part["target"] for part in both] == ["k8s:inference/vllm-0:8123", fleet.url]
    # It needs a token as every server on another machine does, and can't be stopped from here.
    answer = vllmops("status", "-t", target[1], "--json", env=environment)
    assert (answer.code, answer.error["code"]) == (2, "target.remote")
    answer = vllmops("stop", "-t", target[1], "--json", env=environment)
    assert (answer.code, answer.error["code"]) == (2, "target.remote")


def test_pod_errors_are_explained_with_hints(
    vllmops: Vllmops, fleet: Fleet, cluster: Cluster, folder: Path, tmp_path: Path
) -> None:
    environment = cluster.configuration(folder)
    target = ("--admin-token", str(fleet.token), "--json", "-t")
    answer = vllmops("status", *target, "k8s:inference/none", env=environment)
    assert (answer.code, answer.error["code"]) == (5, "target.k8s")
    assert "404" in answer.error["message"]
    assert "kubectl port-forward -n inference none 8000" in answer.error["hint"]
    Path(environment["KUBECONFIG"]).unlink()
    answer = vllmops("status", *target, "k8s:inference/none", env=environment)
    assert (answer.code, answer.error["code"]) == (5, "target.k8s")
    assert "404" not in answer.error["message"]

    (tmp_path / "kubernetes.py").write_text("raise ModuleNotFoundError(name='kubernetes')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    without = {"PYTHONPATH": path}
    answer = vllmops("status", *target, "k8s:inference/vllm-0", env=without)
    assert (answer.code, answer.error["code"]) == (1, "target.k8s")
    assert "vllmops-cli[k8s]" in answer.error["hint"]


@pytest.mark.root_only
def test_forwarded_socket_is_private_and_survives_fd_exhaustion(
    cluster: Cluster, folder: Path
) -> None:
    cluster.configuration(folder)
    made = kubernetes_forward.PortForward(Pod("k8s:inference/vllm-0", "inference", "vllm-0", 8000))
    assert stat.S_IMODE(os.stat(made.path.parent).st_mode) == 0o700
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(made.path))) as client:
        for _ in range(3):
            assert client.get("http://pod/health", timeout=60).status_code == 200
    # Without a descriptor left, who connects is turned away; later it works again.
    with socket.socket(socket.AF_UNIX) as early:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            early.connect(str(made.path))
            assert early.recv(1) == b""
            time.sleep(0.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(made.path))) as client:
        assert client.get("http://pod/health", timeout=60).status_code == 200
    made.listening.shutdown(socket.SHUT_RDWR)
    made.thread.join(60)
    assert not made.thread.is_alive()


def test_a_pod_is_forwarded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Pod] = []

    def make_forward(pod: Pod) -> SimpleNamespace:
        made.append(pod)
        return SimpleNamespace(path=Path(f"/{len(made)}"))

    monkeypatch.setattr(kubernetes_forward, "PortForward", make_forward)
    pods = [Pod(name, "a", name, 8000) for name in ("b", "c", "b")]
    first, other, again = map(kubernetes_forward.open_pod_endpoint, pods)
    assert first == again != other
    assert made == pods[:2]
    kubernetes_forward.open_pod_endpoint.cache_clear()
