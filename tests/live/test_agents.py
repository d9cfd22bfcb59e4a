"""Agents, as their users run them, on a real server whose model says what they need to hear."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from vllmops.docs import load_pages

from ..support.extent import combinations, long
from . import clients
from .conftest import Cli
from .recording import record
from .scripted import Script, serve_script

PROGRAMS = Path(__file__).with_name("frameworks")
PAGE = load_pages()["clients"].text
URL = "http://localhost:8000/v1"
# The blocks of the page: the language, what to install, and all of it.
BLOCKS = re.findall(r"```(\w+)\n((?://|#) (?:npm|pip) install (.+)\n[^`]+)```", PAGE)
LAMP = '<tool_call>\n{"name": "lamp", "arguments": {"on": true}}\n</tool_call>'


@pytest.fixture(scope="module")
def script(
    cli: Cli, plug_in: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Script]:
    with serve_script(cli, plug_in, tmp_path_factory.mktemp("scripted")) as made:
        yield made


def install(folder: Path, *packages: str) -> None:
    """Install packages of npm's into a folder."""
    words = ("npm", "install", "--silent", "--no-fund", "--no-audit", *packages)
    subprocess.run(words, cwd=folder, check=True, timeout=300)


def run(words: Sequence[str | Path], folder: Path, **environment: str) -> str:
    """Run a program, which must succeed; returns its output."""
    ran = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr + ran.stdout
    return ran.stdout + ran.stderr


@long
@pytest.mark.parametrize(
    ("program", "packages", "texts"),
    [
        (
            "ai.mjs",
            ("ai@7", "@ai-sdk/openai@4", "zod@4"),
            (LAMP, LAMP, "it is on", *["yes"] * 7, '{"on": true}'),
        ),
        ("agents.mjs", ("@openai/agents@0.20", "zod@4"), (LAMP, "it is on") * 4),
    ],
)
def test_a_framework_for_javascript(
    script: Script, tmp_path: Path, program: str, packages: Sequence[str], texts: Sequence[str]
) -> None:
    install(tmp_path, *packages)
    (tmp_path / program).write_text((PROGRAMS / program).read_text())
    script.say(*texts)
    with record(script.base, program.removesuffix(".mjs")) as base:
        run(("node", program, base, clients.MODEL), tmp_path)
    assert script.pending_texts == []


@long
@pytest.mark.parametrize(
    ("language", "text", "packages"),
    [block for block in BLOCKS if block[0] != "toml"],
    ids=[block[2] for block in BLOCKS if block[0] != "toml"],
)
def test_the_page_of_clients(
    script: Script, tmp_path: Path, language: str, text: str, packages: str
) -> None:
    program = tmp_path / f"program.{'mjs' if language == 'js' else 'py'}"
    runner = "node"
    if language == "js":
        install(tmp_path, *packages.split())
    else:
        venv.create(tmp_path / "venv", with_pip=False)
        runner = str(tmp_path / "venv/bin/python")
        pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
        subprocess.run((*pip, "--python", runner, "install", *packages.split()), check=True)
    script.say("The lamp is on.")
    name = re.split("[@<>=]", packages.split(maxsplit=1)[0].rsplit("/", maxsplit=1)[-1])[0]
    with record(script.base, f"page-{name}") as base:
        program.write_text(text.replace(URL, base))
        assert "The lamp is on." in run((runner, program), tmp_path, PYTHONPATH="")
    assert script.pending_texts == []


# To a provider of the second name, Codex leaves the compaction.
@long
@pytest.mark.parametrize(
    ("provider", "socket"), combinations(("vLLM", "OpenAI"), ("false", "true"))
)
def test_codex(script: Script, tmp_path: Path, provider: str, socket: str) -> None:
    install(tmp_path, "@openai/codex@0.171")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()

    (block,) = (text for language, text, _ in BLOCKS if language == "toml")
    config = block.replace('"vLLM"', f'"{provider}"')

    def configure(base: str, more: str = "") -> None:
        text = f"{more}\n{config.replace(URL, base)}supports_websockets = {socket}\n"
        (home / "config.toml").write_text(text)

    def codex(*words: str) -> str:
        program = tmp_path / "node_modules/.bin/codex"
        alone = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        return run(
            (program, "exec", *alone, *words), work, CODEX_HOME=str(home), OPENAI_API_KEY="one"
        )

    with record(script.base, f"codex-{provider}-{socket}".lower()) as base:
        configure(base)
        calls = [script.call("exec_command", cmd=f"echo lamp {n} > {n}.txt") for n in range(3)]
        script.say(*calls, "It is on.")
        assert "It is on." in codex("turn the lamp on")
        assert [path.read_text() for path in sorted(work.iterdir())] == [
            f"lamp {n}\n" for n in range(3)
        ]
        script.say("It is off.")
        assert "It is off." in codex("resume", "--last", "off")
        # So little that the conversation is compacted before the answer.
        configure(base, "model_auto_compact_token_limit = 2000")
        script.say("A lamp was turned on and off.", "It is on again.")
        assert "It is on again." in codex("resume", "--last", "on again")
    assert script.pending_texts == []
