"""``vllmops serve --config`` and ``--dry-run --toml``."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from vllmops.commands import serve_config

from ..support.ports import free_port


@pytest.fixture
def config(lab: Any) -> Any:
    """Writes a configuration file that names the model; returns its path."""

    def write(text: str) -> str:
        path = Path(lab.home) / "serve.toml"
        path.write_text(f'model = "{lab.model}"\n{text}')
        return str(path)

    return write


def plan_serve(lab: Any, *words: str) -> Any:
    before = words.index("--") if "--" in words else len(words)
    answer = lab.vllmops("serve", *words[:before], "--dry-run", "--json", *words[before:])
    assert answer.code == 0, answer
    return answer.data


def test_a_file_gives_options_environment_and_vllm_arguments(lab: Any, config: Any) -> None:
    port = free_port()
    path = config(
        f'name = "night"\nport = {port}\nstore = "memory://"\nstore-max-size = 7\nwatch = true\n'
        'vllm-arguments = ["--seed", "3"]\n[env]\nA = "b=c"\n'
    )
    plan = plan_serve(lab, "--config", path)
    assert (plan["name"], plan["model"], plan["watch"]) == ("night", str(lab.model), [])
    assert plan["url"] == f"http://127.0.0.1:{port}"
    assert plan["command"][-2:] == ["--seed", "3"]
    assert plan["environment"]["A"] == "b=c"
    assert plan["environment"]["VLLM_RESPONSES_API_STORE_MAX_SIZE"] == "7"


def test_the_command_line_wins_over_the_file(lab: Any, config: Any) -> None:
    filed, typed = free_port(), free_port()
    path = config(
        f'name = "night"\nport = {filed}\nvllm-arguments = ["--seed", "3", "--host=127.0.0.2"]\n'
        '[env]\nA = "file"\nB = "file"\n'
    )
    words = ("--name", "noon", "--host", "127.0.0.3", "--env", "A=typed")
    plan = plan_serve(lab, "--config", path, *words, "--", "--seed", "4", "--port", str(typed))
    assert plan["name"] == "noon"
    assert plan["url"] == f"http://127.0.0.3:{typed}"
    assert plan["command"][-6:] == ["--seed", "3", "--seed", "4", "--port", str(typed)]
    assert str(filed) not in plan["command"]
    assert (plan["environment"]["A"], plan["environment"]["B"]) == ("typed", "file")
    assert plan_serve(lab, "--config", path, str(lab.model.parent))["model"] == str(
        lab.model.parent
    )


def test_a_model_in_the_home_directory(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell has replaced the tilde."""
    monkeypatch.setenv("HOME", str(lab.model.parent))
    path = Path(lab.home) / "serve.toml"
    path.write_text(f'model = "~/{lab.model.name}"')
    assert str(lab.model) in plan_serve(lab, "--config", str(path))["command"]


def test_a_typed_model_replaces_the_demo_of_the_file(lab: Any) -> None:
    path = Path(lab.home) / "demo.toml"
    path.write_text('demo = "text"')
    assert plan_serve(lab, str(lab.model), "--config", str(path))["model"] == str(lab.model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "unknown key 'prot'; did you mean 'port'?"),
        ("json = true", "unknown key 'json'"),
        ("dry-run = true", "unknown key 'dry-run'"),
        ('port = "8000"', "port must be an integer, not a string"),
        ("port = true", "port must be an integer, not a boolean"),
        ("port = 70000", "port: '70000' is not a whole number from 1 to 65535"),
        ("detach = 1", "detach must be a boolean, not an integer"),
        ("name = 1979-05-27", "name must be a string, not a date or time"),
        ("store-ttl = 'soon'", "store-ttl: 'soon' is not a duration"),
        ("carrier = 'v1'", "carrier: 'v1' is not one of"),
        ("no-patch = 'x'", "no-patch must be an array, not a string"),
        ("vllm-arguments = [1]", "vllm-arguments[0] must be a string, not an integer"),
        ("env = []", "env must be a table, not an array"),
        ("env = {A = 1}", "env.A must be a string, not an integer"),
        ("env = {'A=B' = ''}", "env: 'A=B' can't be the name of a variable"),
        ('name = "a\\u0000"', "name must not contain a NUL character"),
        ("name", "is not TOML"),
        ("x = " + "[" * 100_000, "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_a_usage_error_that_names_the_key(
    lab: Any, config: Any, text: str, message: str
) -> None:
    answer = lab.vllmops("serve", "--config", config(text), "--dry-run")
    assert answer.code == 2
    assert answer.out == ""
    assert message in " ".join(answer.err.split())
    assert "--config" in answer.err


@pytest.mark.parametrize("path", ["missing.toml", "", "/dev/zero"])
def test_a_file_that_can_not_be_read_is_a_failure(lab: Any, path: str) -> None:
    answer = lab.vllmops("serve", "--config", str(Path(lab.home) / path), "--dry-run", "--json")
    assert answer.code == 1
    assert answer.error["code"] in {"file.unreadable", "file.too-large"}


def test_bytes_that_are_no_text_are_a_usage_error(lab: Any, config: Any) -> None:
    path = config("")
    Path(path).write_bytes(b"name = '\xff'")
    answer = lab.vllmops("serve", "--config", path, "--dry-run")
    assert answer.code == 2
    assert "is not TOML" in answer.err


def test_a_dry_run_writes_a_file_that_means_the_same(lab: Any) -> None:
    token = lab.home / "token"  # a path to a secret is none
    token.write_text("a" * 40)
    token.chmod(0o600)
    words = (
        *lab.words("a", "--env", 'ODD=it\'s "a"\\\n\x7f\u202e\U0001f600=', play=1),
        *("--admin-token", str(token)),
        *("--port", str(free_port()), "--detach", "--store", "memory://", "--store-ttl", "12h"),
        *("--carrier", "signed-v1", "--keyring", "none", "--no-patch", "mm-lru-ghost-keys"),
        *("--no-patch", "request-hash-cycle", "--watch-repair"),
    )
    behind = ("--", "--x", "a 'b' \"c\" $d", "--flag")
    written = lab.vllmops(*words, "--dry-run", "--toml", *behind)
    assert written.code == 0, written
    path = Path(lab.home) / "written.toml"
    path.write_text(written.out)
    assert plan_serve(lab, "--config", str(path)) == plan_serve(lab, *words[1:], *behind)
    again = lab.vllmops("serve", "--config", str(path), "--dry-run", "--toml", "--json")
    assert again.data["config"].strip() == written.out.strip()


def test_a_written_file_contains_no_secrets(lab: Any) -> None:
    words = lab.words(
        "a",
        *("--env", "HF_TOKEN=PLANTED-1", "--env", "DB=postgresql://u:PLANTED-2@db/x"),
        *("--watch-webhook", "https://example.com/PLANTED-3"),
        *("--store", "postgresql://u:PLANTED-4@db/x", "--dry-run", "--toml"),
        *("--", "--api-key", "PLANTED-5", "--x", "y", "--api-key=PLANTED-6"),
    )
    text = lab.vllmops(*words).out
    assert "PLANTED" not in text
    assert "redacted" not in text
    for name in ("HF_TOKEN", "DB", "watch-webhook", "store", "vllm-arguments: --api-key"):
        assert f"# {name} is left out: it contains a secret." in text
    table = tomllib.loads(text)
    assert table["vllm-arguments"] == ["--x", "y"]
    assert list(table["env"]) == ["STANDIN"]


def test_toml_needs_a_dry_run(lab: Any) -> None:
    answer = lab.vllmops(*lab.words("a", "--toml"))
    assert answer.code == 2
    assert "--dry-run" in answer.err


def test_without_removes_an_option_with_its_value() -> None:
    arguments = ("--port", "--port", "--x", "--port=1", "--ported", "1", "--port")
    assert serve_config.remove_option(arguments, "--port") == ("--x", "--ported", "1")
