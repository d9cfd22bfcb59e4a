"""No hint destroys data: what a tired person pastes leaves keys, responses and logs alone."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "cli/vllmops", ROOT / "cli/vllmops_responses")
DESTROYS = re.compile(
    r"\brm(\s|$)|\brmdir\b|\bshred\b|\bmkfs|\bwipefs\b|\bdd\s+\S*of=|\btruncate\s+-|\bunlink\s+/|"
    r"\bfind\b.*-delete|\bgit\s+(clean|reset)\b|\b(mv|cp)\s+-f|"
    r"\bFLUSH(ALL|DB)\b|\bDROP\s+(TABLE|DATABASE|SCHEMA)|\bTRUNCATE\b|\bDELETE\s+FROM\b|"
    r"\bdropdb\b|\bkubectl\s+delete|\bdocker\s+(rm|volume|system)\b|\bredis-cli\b.*\bdel\b"
)
# Of our own commands; a manual may explain what no hint may recommend.
OURS = re.compile(r"--force\b|--overwrite\b|\b(responses|conversations) (purge|delete)\b")

# A string that may stand there, and why: by its file and how it begins.
ALLOWED = {
    ("commands/bundle.py", "--force"): "an option's name",
    ("commands/bundle.py", "vllmops bundle --force, or"): "what it asks where nobody can be asked",
    ("commands/keygen.py", "--force"): "an option's name",
    ("commands/keys/export.py", "--force"): "an option's name",
    ("commands/keys/promote.py", "--force"): "an option's name",
    ("commands/keys/retire.py", "--force"): "an option's name",
    ("commands/responses/export.py", "--force"): "an option's name",
    ("commands/responses/import_.py", "--overwrite"): "an option's name",
    ("commands/conversations/delete.py", "``vllmops conv"): "the module's title",
    ("commands/conversations/purge.py", "``vllmops conv"): "the module's title",
    ("commands/conversations/__init__.py", "Example: vllmops conv"): "of the commands' own help",
    ("commands/responses/delete.py", "``vllmops responses delete``"): "the module's title",
    ("commands/responses/purge.py", "``vllmops responses purge``"): "the module's title",
    ("commands/responses/__init__.py", "Example: vllmops responses "): "of the commands' own help",
    ("commands/stop.py", "--force"): "an option's name; it cuts requests off, and deletes nothing",
    (
        "collect/stacks/pyspy.py",
        "{} -m pip install --force-reinstall py-spy",
    ): "pip's own, of a program",
    ("store/backends/sql.py", ""): "statements of the store's own, which nobody is told to paste",
}


def strings(text: str) -> list[tuple[int, str]]:
    """Every string of a module with its line; what a f-string fills in is left open."""
    found = []
    parts_of_one: set[ast.AST] = set()
    for node in ast.walk(ast.parse(text)):  # from the outside in
        if node in parts_of_one:
            continue
        if isinstance(node, ast.JoinedStr):
            parts_of_one |= set(node.values)
            parts = [
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            ]
            found.append((node.lineno, "".join(parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append((node.lineno, node.value))
    return found


def is_allowed(name: str, text: str) -> bool:
    return any(name == file and text.startswith(start) for file, start in ALLOWED)


def test_no_string_of_the_package_tells_to_destroy() -> None:
    found = []
    for package, path in [(p, path) for p in PACKAGES for path in sorted(p.rglob("*.py"))]:
        name = str(path.relative_to(package))
        found += [
            f"{name}:{line}: {text}"
            for line, text in strings(path.read_text())
            if (DESTROYS.search(text) or OURS.search(text)) and not is_allowed(name, text)
        ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "path",
    [*(path for package in PACKAGES for path in package.rglob("*.toml")), ROOT / "README.md"],
    ids=lambda path: path.name,
)
def test_nor_does_a_table_or_the_readme(path: Path) -> None:
    found = [
        f"{path.name}:{number}: {line}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if DESTROYS.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "hint",
    [
        "rm -r /var/lib/vllmops, then restart",
        "then rm -rf PATH",
        "rm /dev/shm/NAME",
        "another --out, or --force to replace it",
        "redis-cli FLUSHALL",
        "DROP TABLE vllmops_responses",
        "vllmops responses import --overwrite FILE",
        "truncate -s 0 server.log",
        "rm {}",
        "find ~/.vllmops -delete",
    ],
)
def test_the_scan_finds_them(hint: str) -> None:
    assert DESTROYS.search(hint) or OURS.search(hint)
