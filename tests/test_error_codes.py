"""Every code that is compared is one that is raised, and every one that is raised has a page."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import vllmops
import vllmops_responses
from vllmops.docs import load_pages
from vllmops.rules.diagnosis import list_checks
from vllmops.support.error_codes import BY_EXIT, CODES, parse_error_code
from vllmops.support.errors import ExitCode

PACKAGES = (Path(vllmops.__file__).parent, Path(vllmops_responses.__file__).parent)
COLLECTIONS = (ast.Set, ast.List, ast.Tuple)


@cache
def trees() -> list[ast.Module]:
    files = [
        file
        for package in PACKAGES
        for file in package.rglob("*.py")
        if file.name != "error_codes.py"
    ]
    return [ast.parse(file.read_text()) for file in files]


def texts(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def collections(tree: ast.Module) -> dict[str, ast.expr]:
    """A module's named sets of texts: what codes are compared with."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = node.value
            if isinstance(value, ast.Call) and value.args:
                value = value.args[0]
            if isinstance(value, COLLECTIONS):
                found[node.targets[0].id] = value
    return found


def collect_compared_codes() -> set[str]:
    """The texts that some ``.code`` is compared with."""
    found: set[str] = set()
    for tree in trees():
        named = collections(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Compare):
                continue
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Attribute) and side.attr == "code" for side in sides):
                for side in sides:
                    name = side.id if isinstance(side, ast.Name) else ""
                    found |= set(texts(named.get(name, side)))
    return found


@cache
def collect_raised_codes() -> set[str]:
    """The error codes that stand somewhere else than in a comparison."""
    found: set[str] = set()
    for tree in trees():
        skipped = set(collections(tree).values())
        left: list[ast.AST] = [tree]
        while left:
            node = left.pop()
            if isinstance(node, ast.Compare) or node in skipped:
                continue
            if isinstance(node, ast.Constant) and node.value in CODES:
                found.add(str(node.value))
            left += ast.iter_child_nodes(node)
    return found


def test_every_code_that_is_compared_is_one_that_is_raised() -> None:
    words = {code for code in collect_compared_codes() if "." in code}
    assert {"agent.absent", "stacks.seccomp", "responses.unknown", "stack.crash"} <= words
    assert not words - collect_raised_codes() - {check.code for check in list_checks()}


def test_every_code_is_in_the_group_of_one_exit_code() -> None:
    assert sum(len(get_args(group)) for group in BY_EXIT.values()) == len(CODES)
    assert set(BY_EXIT) == {*ExitCode} - {ExitCode.OK}


def test_every_registered_code_is_raised() -> None:
    assert not CODES - collect_raised_codes()


def test_every_code_has_its_page_and_every_error_page_a_code() -> None:
    assert {page.name for page in load_pages().values() if page.kind == "error"} == CODES


def test_a_page_says_what_the_error_means_and_what_to_do() -> None:
    for page in load_pages().values():
        if page.kind == "error":
            text = page.text.partition("\n")[2].strip()
            assert text.endswith("."), page.name
            assert 40 < len(text) < 900, page.name


def test_a_code_from_a_newer_server_gets_a_known_one() -> None:
    assert parse_error_code("keys.locked", "admin.failed") == "keys.locked"
    assert parse_error_code("keys.from-the-future", "admin.failed") == "admin.failed"
