"""What names a server, and what names none."""

import pytest
from tests.support.commands import Vllmops

from vllmops.model.targets import ServerUrl, parse_target
from vllmops.support.errors import ExitCode, VllmopsError

NONE = (
    "",
    " ",
    "-5",
    "+5",
    "\N{ARABIC-INDIC DIGIT THREE}",
    "a/b",
    "a b",
    "a\tb",
    "x" * 64,
    "../../etc",
    "localhost:8000",
    "http://",
    "http:///v1",
    "http://:8000",
    "http://h:99999",
    "http://h:0",
    "http://h:",
    "http://x:abc",
    "http://h:-1",
    "https://[::1",
    "http://[zz]:80",
    "http://a b",
    "http://h\n:80",
    "http://h\x00",
    "http://h\\x",
    "http://xn--/",
    "http://\N{LATIN SMALL LETTER U WITH DIAERESIS}..de",
    f"http://{'a' * 64}.example/",
    f"http://{'a.' * 130}example/",
    "ftp://h",
    "file:///etc/passwd",
    "://",
    "http://h?x=1",
    "http://h#x",
    "http://user:hunter2@h:80",
)


@pytest.mark.parametrize("text", NONE)
def test_malformed_targets_are_refused(text: str) -> None:
    with pytest.raises(VllmopsError) as caught:
        parse_target(text)
    assert (caught.value.code, caught.value.exit_code) == ("usage", ExitCode.USAGE)
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://h", ServerUrl("http://h", "h", 80)),
        ("https://h/", ServerUrl("https://h", "h", 443)),
        ("HTTP://h:8000/v1/", ServerUrl("http://h:8000", "h", 8000)),
        ("http://[::1]:8000", ServerUrl("http://[::1]:8000", "::1", 8000)),
        ("https://gate/team/v1", ServerUrl("https://gate/team", "gate", 443)),
        (
            "http://m\N{LATIN SMALL LETTER U WITH DIAERESIS}ller:8",
            ServerUrl(
                "http://m\N{LATIN SMALL LETTER U WITH DIAERESIS}ller:8",
                "m\N{LATIN SMALL LETTER U WITH DIAERESIS}ller",
                8,
            ),
        ),
    ],
)
def test_urls(text: str, url: ServerUrl) -> None:
    assert parse_target(text) == url


@pytest.mark.parametrize("words", [("status",), ("responses", "list"), ("keys", "push")])
@pytest.mark.parametrize("text", ["", "http://h:99999", "http://x:abc", "+5", "https://[::1"])
def test_commands_refuse_it(vllmops: Vllmops, words: tuple[str, ...], text: str) -> None:
    answer = vllmops(*words, "--json", "-t", text)
    assert (answer.code, answer.error["code"]) == (ExitCode.USAGE, "usage")
    if text and words != ("keys", "push"):
        answer = vllmops(*words, "--json", env={"VLLMOPS_TARGET": text})
        assert (answer.code, answer.error["code"]) == (ExitCode.USAGE, "usage")


@pytest.mark.parametrize("text", ["0", "9" * 60, "nosuch", "http://127.0.0.1:1"])
def test_unknown_targets_exit_as_not_found(vllmops: Vllmops, text: str) -> None:
    assert vllmops("status", "--json", "-t", text).code == ExitCode.NOT_FOUND
    assert vllmops("stop", "--json", text).code == ExitCode.NOT_FOUND
