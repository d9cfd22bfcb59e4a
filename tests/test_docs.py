"""README and the manual: every example is a command line that vllmops takes.

What needs no server is run, what needs no vLLM is run on the stand-in of `conftest.Lab`, what needs
vLLM is run by tests/live/test_examples.py; the rest is only parsed here.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import click
import pytest

from vllmops import app
from vllmops.docs import load_pages
from vllmops.model import snapshot_files
from vllmops.model.memory import MemoryRecordingHead, MemorySample, ProcessMemory
from vllmops.support import home
from vllmops_responses.keys import keyring_file
from vllmops_responses.keys.carrier import seal_history

from .support import picture
from .support.promises import without_timed

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "cli/vllmops/docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")
CODE = re.compile(r"`([^`]+)`")
DUMP = ROOT / "tests/rules/stacks/mm-cache-eviction-spin.txt"

# What needs no server, and its exit code.
RUN = {
    "vllmops ps": 0,
    "vllmops ps --json": 0,
    "vllmops doctor --list": 0,
    "vllmops metrics --alerts prometheus > vllmops.rules.yml": 0,
    "vllmops metrics --board overview > overview.json": 0,
    "vllmops metrics --board incident > incident.json": 0,
    "vllmops metrics --alerts kubernetes > vllmops.rule.yaml": 0,
    "vllmops heal --list": 0,
    "vllmops top --once": 0,
    "vllmops top --once --json": 0,
    "vllmops keys list": 1,
    "vllmops keys add": 0,
    "vllmops keys rotate": 0,
    "vllmops keys rotate --dry-run": 0,
    "vllmops keys status": 1,
    "vllmops keys verify - < carrier.txt": 0,
    "vllmops memory report memory.jsonl": 0,
    "vllmops keygen --out admin.key": 0,
    "vllmops patches show mm-lru-ghost-keys": 0,
    "vllmops patches list --versions": 0,
    "vllmops stacks explain dump.txt": 1,
    "vllmops stacks explain dump.txt --fact progress=frozen": 1,
    "vllmops serve Qwen/Qwen3-0.6B --dry-run -- --uds /run/vllm.sock": 0,
    "vllmops responses check-store sqlite:////tmp/responses.db": 0,
    "vllmops integrate systemd > /etc/systemd/system/vllmops@.service": 0,
    "vllmops integrate kubernetes --deployment vllm > patch.yaml": 0,
    "vllmops integrate kubernetes --deployment vllm --debug registry.example/vllmops:1 --keyring"
    " > patch.yaml": 0,
    "vllmops integrate kubernetes --deployment vllm --secret keyring.json > secret.yaml": 0,
    "vllmops integrate kubernetes --alerts > alerts.yaml": 0,
    "vllmops completions bash > completions/vllmops.bash": 0,
}
# In this order on one server, which is called demo.
SERVED = {
    "vllmops metrics -t demo": 0,
    "vllmops ps": 0,
    "vllmops status demo": 0,
    "vllmops wait demo --for ready": 0,
    "vllmops doctor": 0,
    "vllmops doctor -t demo --canary": 1,  # the stand-in generates no token
    "vllmops stacks dump -t demo": 0,
    "vllmops bundle -t demo --dry-run": 0,
    "vllmops bundle -t demo -o hang.tar.gz": 0,
    "vllmops doctor hang.tar.gz": 0,
    "vllmops doctor hang.tar.gz --history": 0,
    "vllmops stacks explain hang.tar.gz": 0,
    "vllmops restart demo": 0,
    "vllmops probe --liveness -t demo": 0,
    "vllmops probe --readiness -t demo --json": 0,
    "vllmops stop demo --timeout 120": 0,
    "vllmops stop demo": 5,  # it has ended already
}
# In this order on a live server: the exit code, and options that make it quick.
LIVE = {
    "vllmops ps --json": (0, ""),
    "vllmops cache inspect -t demo": (0, ""),
    "vllmops cache compare -t demo": (0, ""),
    "vllmops heal": (0, ""),
    "vllmops cache repair -t demo": (0, ""),
    "vllmops cache repair -t demo --dry-run": (0, ""),
    "vllmops cache reset -t demo": (0, ""),
    "vllmops attach -t 29914 --dry-run": (1, ""),  # the agent runs there already
    "vllmops attach -t 29914 --yes": (1, ""),
    "vllmops patches list -t demo": (0, ""),
    "vllmops patches verify -t demo": (0, ""),
    "vllmops memory record -t demo --rounds 5 --load images --save memory.jsonl": (
        0,
        "--rounds 2 --requests 2 --tolerance 10G --fail-on error",
    ),
    "vllmops memory record -t demo --interval 10 --duration 3600": (
        0,
        "--interval 0.5 --duration 1",
    ),
    "vllmops doctor -t demo --history": (0, ""),
    "vllmops drain demo": (0, ""),
    "vllmops drain demo --wait --timeout 120": (0, ""),
    "vllmops resume demo": (0, ""),
    "vllmops memory report memory.jsonl": (0, "--tolerance 10G"),
    "vllmops responses list -t demo": (0, ""),
    "vllmops responses show resp_9d1f43c8 -t demo": (0, ""),
    "vllmops responses stats -t demo": (0, ""),
    "vllmops conversations list -t demo": (0, ""),
    "vllmops conversations show conv_4f1c -t demo": (5, ""),  # one that was deleted
    "vllmops conversations delete conv_4f1c -t demo": (5, ""),
    "vllmops conversations purge --older-than 90d --dry-run -t demo": (0, ""),
    "vllmops responses cancel --all-running --older-than 15m -t demo": (0, ""),
    "vllmops responses purge --older-than 7d --status failed -t demo": (0, "--yes"),
    "vllmops requests list -t demo": (0, ""),
    "vllmops requests list -t demo --stuck": (0, ""),
    "vllmops requests show chatcmpl-1f0c -t demo": (5, ""),  # one that has ended
    "vllmops requests abort chatcmpl-1f0c -t demo": (5, ""),
    "vllmops requests abort --stuck -t demo --dry-run": (0, ""),
    "vllmops heal -t demo --dry-run": (0, ""),
    "vllmops heal -t demo": (0, ""),
    "vllmops doctor -t demo": (0, ""),
    "vllmops doctor -t demo --json": (0, ""),
    "vllmops doctor -t demo --fail-on warning": (0, "--skip machine --skip security"),
    "vllmops doctor -t demo --only mm-cache --skip machine.disk": (0, ""),
    "vllmops stacks dump --explain": (0, "--samples 1"),
    "vllmops stacks dump -t demo --explain": (0, "--samples 2 --interval 0.1"),
    "vllmops stacks dump --cuda": (1, ""),  # it was not armed
    "vllmops watch -t demo --once --for 3600": (0, "--for 1"),
    "vllmops watch -t demo --webhook https://example.org/hook": (0, "--for 1"),
    "vllmops doctor hang.tar.gz": (0, ""),
    "vllmops cache inspect hang.tar.gz": (0, ""),
    "vllmops memory report hang.tar.gz": (0, "--tolerance 10G"),
}
# Only parsed.
PARSED = {
    "vllmops metrics -t demo --listen 9105": "it does not end",
    "vllmops doctor --clean-shm": "it acts on the whole machine",
    "vllmops keys push -t https://b.example --admin-token admin.key": "a server elsewhere",
    "vllmops status -t https://gpu7.example --admin-token admin.key": "the same",
    "vllmops doctor -t https://gpu7.example --admin-token admin.key": "the same",
    "vllmops status -t https://gpu7.example -t https://gpu8.example --admin-token admin.key": "two",
    "vllmops doctor -t k8s:inference/vllm-0 --admin-token admin.key": "a cluster",
    "vllmops status -t k8s:inference/vllm-0:8080 --admin-token admin.key": "a cluster",
    "vllmops doctor -t @fleet.txt --admin-token admin.key --json": "several servers elsewhere",
    "vllmops stacks dump --core core.4711 --explain": "a core file",
    "vllmops serve MODEL --cuda-coredump": "a GPU",
    "vllmops probe --listen 8081 -t demo": "it does not end",
    "vllmops logs demo -f --process engine": "it does not end",
    "vllmops top": "a terminal; tests/top has it",
    "vllmops top -t demo -t 29914": "the same",
    "vllmops responses export --store sqlite:////srv/responses.db -o responses.jsonl": "a store",
    "vllmops responses import responses.jsonl --store postgresql://user@host/database": "a store",
    **dict.fromkeys(
        (
            "vllmops conversations export --store sqlite:////srv/responses.db -o a.jsonl",
            "vllmops conversations import a.jsonl --store postgresql://user@host/database",
        ),
        "a store",
    ),
}


def blocks(text: str, language: str) -> Iterator[str]:
    return (match[1] for match in re.finditer(rf"^```{language}\n(.*?)^```", text, re.M | re.S))


def commands(page: Path) -> list[str]:
    """The command lines of a page's ``console`` blocks."""
    lines = chain.from_iterable(block.splitlines() for block in blocks(page.read_text(), "console"))
    return [line[2:] for line in lines if line.startswith("$ ")]


EXAMPLES = sorted({line for page in PAGES for line in commands(page)})


def words(line: str) -> list[str]:
    """A command line without redirection."""
    return shlex.split(re.split(" [<>] ", line)[0])


def parse(line: list[str]) -> None:
    """Have click parse a command line of ours, and run nothing.

    Raises:
        click.ClickException: if click refuses it.
    """
    group = app.build_root_command()
    # Commands are kept for all tests, with the help option of their first context.
    context = click.Context(group, help_option_names=["-h", "--help"])
    _, command, rest = group.resolve_command(context, line[:])
    if isinstance(command, click.Group) or hasattr(command, "commands"):
        _, command, rest = command.resolve_command(context, rest)
    command.make_context(" ".join(line[:2]), rest, parent=context, resilient_parsing=False)


def test_readme_fits_on_a_few_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_are_in_blocks_that_are_checked(page: Path) -> None:
    """Each block says its language, and a ``console`` block has command lines alone."""
    text = page.read_text()
    fences = re.findall(r"^```(\w*)$", text, re.M)
    assert set(fences[::2]) <= {
        *["console", "python", "json", "text", "sh", "toml", "yaml", "js"]
    }, page
    for block in blocks(text, "console"):
        assert all(line.startswith("$ ") for line in block.splitlines()), block


@pytest.mark.parametrize("line", EXAMPLES)
def test_every_example_is_a_command_line_that_is_taken(line: str) -> None:
    program, *rest = words(line)
    match program:
        case "vllmops":
            parse(rest)
        case "python3":
            assert rest[0] == "cli/bootstrap.py"
            assert rest[1] in {"demo", "test"}
        case "python":
            assert rest == ["-m", picture.__name__]
        case "pip":
            assert rest[0] in {"install", "wheel"}
        case _:
            pytest.fail(f"no check for {program}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_in_sentences_exist(page: Path) -> None:
    """``vllmops NOUN VERB`` in running text names a command that there is."""
    for code in CODE.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        first, *rest = code.split() or [""]
        if first != "vllmops" or not rest:
            continue
        entry = app.COMMANDS.get(rest[0])
        assert entry, code
        if rest[0] == "help" and rest[1:]:
            assert rest[1] in load_pages() or rest[1] in {"WORD", "CODE", "[WORD]"}, code
        elif entry.has_subcommands and rest[1:]:
            group = app.build_root_command()
            _, noun, _ = group.resolve_command(click.Context(group), [rest[0]])
            for verb in rest[1].replace("\\", "").split("|"):
                assert verb in noun.commands, code


def prepare(vllmops: Any, line: str) -> None:
    """Write the file that an example reads into the current directory."""
    if "dump.txt" in line:
        shutil.copy(DUMP, "dump.txt")
    if "carrier.txt" in line:
        assert vllmops("keys", "add").code == 0
        sealed = seal_history(
            [], keyring_file.load_keyring(home.resolve_home() / "keyring.json"), model="m", owner=""
        )
        Path("carrier.txt").write_text(sealed)
    if "--secret keyring.json" in line:
        assert vllmops("keys", "add", "--keyring", "keyring.json").code == 0
    if "memory.jsonl" in line:
        journal = snapshot_files.Journal(
            Path("memory.jsonl"), MemoryRecordingHead(server="demo", started_at=0.0)
        )
        for number in range(8):
            engine = ProcessMemory(role="engine", pid=1, rss_bytes=1 << 30)
            journal.append(MemorySample(taken_at=10.0 * number, processes=[engine]))


def test_every_example_is_run_or_has_a_reason() -> None:
    """All but those that start servers, which tests/live/test_serve.py does in every way."""
    ours = {line for line in EXAMPLES if line.startswith("vllmops")}
    rest = ours - {*RUN, *SERVED, *LIVE, *PARSED}
    assert {line for line in rest if not line.startswith("vllmops serve ")} == set()
    assert {*RUN, *SERVED, *LIVE, *PARSED} <= ours, "no page has this example"


@pytest.mark.parametrize("line", sorted(RUN))
def test_examples_that_need_no_server_work(
    vllmops: Any, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    without_timed(monkeypatch)
    prepare(vllmops, line)

    def redirect() -> None:
        os.dup2(os.open(line.partition(" < ")[2], os.O_RDONLY), 0)

    typed = [word.replace("/tmp/", f"{tmp_path}/") for word in words(line)[1:]]
    answer = vllmops(*typed, before=redirect if " < " in line else lambda: None)
    assert answer.code == RUN[line], answer


def test_examples_that_need_no_vllm_work(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.serve("demo")
    monkeypatch.chdir(tmp_path)
    for line, code in SERVED.items():
        answer = lab.vllmops(*words(line)[1:])
        assert answer.code == code, (line, answer)


@pytest.mark.parametrize("drawn", picture.PICTURES, ids=lambda path: str(path.name))
def test_a_picture_is_what_its_command_draws(drawn: Path) -> None:
    assert drawn.read_text() == picture.PICTURES[drawn](), "python -m tests.support.picture"
    assert drawn.name in (ROOT / "README.md").read_text()


def test_the_licence_is_in_the_clone_and_named_by_the_package() -> None:
    import hashlib

    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()
