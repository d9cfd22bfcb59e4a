"""What ``vllmops integrate`` prints is taken by the systems that it is for."""

from __future__ import annotations

import base64
import copy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from vllmops_responses.keys import keyring_file


def test_a_unit_that_systemd_takes(vllmops: Any, tmp_path: Path) -> None:
    unit = vllmops("integrate", "systemd", "--run-as", "root", "--json").data["unit"]
    assert "Type=notify\n" in unit
    assert "Restart=on-failure\n" in unit
    assert "StartLimitBurst=6\n" in unit
    assert "User=root\n" in unit
    assert vllmops("integrate", "systemd", "--run-as", "root").out.rstrip() == unit.rstrip()
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed: only the text was checked")
    path = tmp_path / "vllmops@demo.service"
    path.write_text(unit)
    ran = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False
    )
    wrong = [line for line in ran.stderr.splitlines() if str(path) in line]
    # systemd before 254.
    assert all("RestartSteps" in line or "RestartMaxDelaySec" in line for line in wrong), wrong
    assert ran.returncode == 0, ran.stderr


def test_a_program_whose_path_has_what_systemd_obeys(
    vllmops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", r'/opt/a "b" 100%n \t/bin/python')
    unit = vllmops("integrate", "systemd").out
    assert r'ExecStart="/opt/a \"b\" 100%%n \\t/bin/vllmops" serve ' in unit


@pytest.mark.parametrize(
    "words",
    [
        ("systemd", "--run-as", "x\nExecStartPre=/bin/evil"),
        ("kubernetes", "--deployment", "a b"),
        ("kubernetes", "--container", "x: y"),
        ("kubernetes", "--debug", "x\nprivileged: true"),
        ("kubernetes", "--drain", "0"),
    ],
)
def test_integrate_refuses_values_that_break_the_format(
    vllmops: Any, words: tuple[str, ...]
) -> None:
    answer = vllmops("integrate", *words, "--json")
    assert (answer.code, answer.error["code"]) == (2, "usage")


def merge_patch(base: Any, patch: Any) -> Any:
    """A strategic merge, as far as a Deployment needs it: lists of named things go by name."""
    if isinstance(patch, dict):
        base = base if isinstance(base, dict) else {}
        both = {**base, **{key: merge_patch(base.get(key), patch[key]) for key in patch}}
        return {key: value for key, value in both.items() if value is not None}
    if isinstance(base, list) and all(isinstance(one, dict) and "name" in one for one in base):
        named = {one["name"]: one for one in base}
        for one in patch:
            named[one["name"]] = merge_patch(named.get(one["name"], {}), one)
        return list(named.values())
    return patch


DEPLOYMENT: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "web", "labels": {"app": "web"}},
    "spec": {
        "selector": {"matchLabels": {"app": "web"}},
        "template": {
            "metadata": {"labels": {"app": "web"}},
            "spec": {
                "containers": [
                    {
                        "name": "engine",
                        "image": "vllm",
                        "args": ["serve", "m"],
                        "env": [{"name": "A", "value": "b"}],
                    }
                ]
            },
        },
    },
}


def valid(manifest: Any) -> None:
    """Raises where Kubernetes would refuse it."""
    newest = kubernetes_validate.latest_version()
    kubernetes_validate.validate(manifest, newest, strict=True)


def test_a_deployment_that_kubernetes_takes(vllmops: Any) -> None:
    words = ("--deployment", "web", "--container", "engine", "--probe-port", "9000")
    more = ("--drain", "30", "--debug", "registry.example/ops:1", "--keyring")
    text = vllmops("integrate", "kubernetes", *words, *more, "--json").data["manifest"]
    whole = merge_patch(DEPLOYMENT, yaml.safe_load(text))
    pod = whole["spec"]["template"]["spec"]
    engine, debug = pod["containers"]
    assert (engine["image"], engine["args"]) == ("vllm", ["serve", "m"])  # they stay
    assert [one["name"] for one in engine["env"]] == ["A", "VLLMOPS_KEYRING"]
    asked = {"path": "/livez", "port": "probes", "scheme": "HTTP"}
    assert engine["livenessProbe"]["httpGet"] == asked
    assert engine["ports"] == [{"name": "probes", "containerPort": 9000}]
    assert engine["lifecycle"]["preStop"]["exec"]["command"][-1] == "30"
    assert pod["terminationGracePeriodSeconds"] > 30
    assert pod["shareProcessNamespace"] is True
    assert debug["securityContext"]["capabilities"]["add"] == ["SYS_PTRACE"]
    assert pod["volumes"][0]["secret"]["defaultMode"] == 0o400
    valid(whole)
    plain = merge_patch(DEPLOYMENT, yaml.safe_load(vllmops("integrate", "kubernetes").out))
    assert "volumes" not in plain["spec"]["template"]["spec"]
    valid(plain | {"spec": merge_patch(DEPLOYMENT["spec"], {})})


OLD = {
    "startupProbe": {"exec": {"command": ["true"]}, "periodSeconds": 60},
    "livenessProbe": {
        "httpGet": {"path": "/health", "port": 8000, "scheme": "HTTPS", "host": "a.example"}
    },
    "readinessProbe": {"tcpSocket": {"port": 8000}},
    "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
}


def test_probes_of_other_kinds_are_replaced(vllmops: Any) -> None:
    base = copy.deepcopy(DEPLOYMENT)
    base["spec"]["template"]["spec"]["containers"][0] |= OLD
    text = vllmops("integrate", "kubernetes", "--container", "engine").out
    whole = merge_patch(base, yaml.safe_load(text))
    engine = whole["spec"]["template"]["spec"]["containers"][0]
    for name, path in (("startup", "startupz"), ("liveness", "livez"), ("readiness", "readyz")):
        probe = engine[f"{name}Probe"]
        assert probe["httpGet"] == {"path": f"/{path}", "port": "probes", "scheme": "HTTP"}
        assert not probe.keys() & {"exec", "tcpSocket", "grpc"}  # Kubernetes refuses two of them
    assert list(engine["lifecycle"]["preStop"]) == ["exec"]
    valid(whole)


@pytest.mark.parametrize("name", ["123", "1e3", "null", "true", "0x1f", "on", "2026-01-02"])
def test_a_name_that_yaml_takes_for_something_else(vllmops: Any, name: str) -> None:
    words = ("--deployment", name, "--container", name, "--debug", name, "--keyring")
    made = yaml.safe_load(vllmops("integrate", "kubernetes", *words).out)
    pod = made["spec"]["template"]["spec"]
    assert made["metadata"]["name"] == name
    assert [one["name"] for one in pod["containers"]] == [name, "vllmops-debug"]
    assert pod["containers"][1]["image"] == name
    assert pod["volumes"][0]["secret"]["secretName"] == f"{name}-vllmops-keyring"


def test_a_deployment_may_have_dots_in_its_name(vllmops: Any) -> None:
    made = yaml.safe_load(vllmops("integrate", "kubernetes", "--deployment", "vllm-0.33").out)
    assert made["metadata"]["name"] == "vllm-0.33"
    for name in (".a", "a..b", "a." + "b" * 64, ".".join(["a" * 60] * 4)):
        assert vllmops("integrate", "kubernetes", "--deployment", name).code == 2


def test_a_secret_with_the_keys(vllmops: Any, tmp_path: Path) -> None:
    path = tmp_path / "ring.json"
    assert vllmops("keys", "add", "--keyring", str(path)).code == 0
    text = vllmops("integrate", "kubernetes", "--secret", str(path)).out
    secret = yaml.safe_load(text)
    assert secret["metadata"]["name"] == "vllm-vllmops-keyring"
    content = base64.b64decode(secret["data"]["keyring.json"])
    assert keyring_file.decode_keyring(content, path) == keyring_file.load_keyring(path)
    valid(secret)
    answer = vllmops("integrate", "kubernetes", "--secret", str(tmp_path / "none"), "--json")
    assert (answer.code, answer.error["code"]) == (1, "keys.no-ring")


def test_a_keyring_as_kubernetes_mounts_it_is_read(vllmops: Any, tmp_path: Path) -> None:
    """A Secret's file is a link into a folder that is a link, and is read-only."""
    data = tmp_path / "..2026"
    data.mkdir()
    assert vllmops("keys", "add", "--keyring", str(data / "keyring.json")).code == 0
    (data / "keyring.json").chmod(0o400)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "keyring.json").symlink_to("..data/keyring.json")
    assert vllmops("keys", "list", "--keyring", str(tmp_path / "keyring.json")).code == 0


def test_the_alerts_are_an_object_of_their_own(vllmops: Any) -> None:
    # kubernetes-validate has no schema of the operator's objects; promtool judges the rules.
    made = yaml.safe_load(vllmops("integrate", "kubernetes", "--alerts", "--json").data["manifest"])
    assert (made["kind"], made["apiVersion"]) == ("PrometheusRule", "monitoring.coreos.com/v1")
    assert made["spec"]["groups"][0]["rules"]


def test_integrate_refuses_two_objects_at_once(vllmops: Any, tmp_path: Path) -> None:
    words = ("integrate", "kubernetes", "--alerts", "--secret", str(tmp_path / "keyring.json"))
    answer = vllmops(*words)
    assert answer.code == 2
    assert "give one" in answer.err
