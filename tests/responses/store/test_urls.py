"""URLs of stores: what is refused, and that no password of one is ever told."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllmops.model.environment import STORE
from vllmops.support import urls
from vllmops.support.errors import ExitCode, VllmopsError
from vllmops_responses.store import backend_factory, settings
from vllmops_responses.store.backend import Limits, StoreUnavailable
from vllmops_responses.store.backends.sqlite import Sqlite
from vllmops_responses.store.response_store import ResponseStore

from ...support.extent import sample_cases

SECRET = "S3cr3tWord"
# {} is a password as somebody types it; most of these are no URL that anything takes.
FORMS = [
    "redis://:{}@h",
    "redis://:{}@h:6379/0",
    "redis://u:{}@h:6379/0",
    "redis://{}@h",
    "redis://{}:@h",
    "redis://:{}",
    "redis://u:{}",
    "redis://u:{}@",
    "redis://u:{}@h:notaport",
    "redis://h?password={}",
    "redis://h/0?db=1&password={}&protocol=3",
    "redis://h:1?passwd={}",
    "redis://h:1?pass={}",
    "redis://h:1?auth={}",
    "redis://h:1?token={}",
    "redis://h:1?unknown={}",
    "redis://h:1?{}",
    "redis://h:1#{}",
    "rediss://u:{}@h?ssl_password={}",
    "valkey://u:{}@h",
    "redis+sentinel://u:{}@h:1,h2:2/main",
    "redis+sentinel://h:1,h2:2/main?sentinel_password={}",
    "valkeys+cluster://u:{}@h:1,h2:2",
    "postgresql://u:{}@h/d",
    "postgresql://u:{}@h1:1,h2:2/d?target_session_attrs=any",
    "postgresql://u:{}@[::1/d",
    "postgresql://h/d?password={}",
    "postgresql://h/d?user=u&password={}&sslmode=disable",
    "postgresql://h/d?sslpassword={}",
    "postgres://u:{}@/d?host=/run",
    "postgresql://:{}",
    "postgresql:u:{}@h/d",
    "postgresql:/u:{}@h/d",
    "host=h password={} dbname=d",
    "u:{}@h/d",
    "mysql://u:{}@h",
    "mysql+pymysql://u:{}@h/d?x=y",
    "mongodb://u:{}@h1,h2/d?authSource=a",
    "weird+scheme://u:{}@h",
    "://u:{}@h",
    "sqlite:///f?password={}",
    "memory://u:{}@h",
    "http://u:{}@h:80",
]
PASSWORDS = [
    SECRET,
    f"{SECRET}@x{SECRET}",
    f"a/{SECRET}",
    f"{SECRET}:{SECRET}",
    f"{SECRET}#{SECRET}",
    f"{SECRET}?{SECRET}",
    f"{SECRET}%{SECRET}",
    f"p@{SECRET}/x?{SECRET}=1#{SECRET}",
    f"{SECRET}&{SECRET}={SECRET}",
    f"[{SECRET}]",
    f"{SECRET} {SECRET}",
    f"'{SECRET}\"",
]


@pytest.mark.parametrize(
    "name", ["?x", "a#b", "a%3Fb", "a@b:c", "a?b=c&d", "\n", "ä", "\udcff", "a b"]
)
def test_a_file_with_any_name_has_a_url(tmp_path: Path, name: str) -> None:
    file = tmp_path / name / "responses.db"
    url = urls.make_sqlite_url(file)
    assert urls.parse_store_url(url).scheme == "sqlite"
    assert str(tmp_path) in urls.redact_url(url)
    made = backend_factory.make_backend(url)
    assert isinstance(made, Sqlite)
    assert made.path == file


@pytest.mark.parametrize("name", ["~nobody-of-that-name/a.db", "a%00.db"])
def test_a_name_that_no_file_can_have_is_a_usage_error(name: str) -> None:
    with pytest.raises(VllmopsError) as caught:
        backend_factory.make_backend(f"sqlite:///{name}")
    assert caught.value.exit_code == ExitCode.USAGE
    assert name in caught.value.message


@pytest.mark.parametrize("form", sample_cases(FORMS, 4))
def test_no_password_is_shown(form: str) -> None:
    for password in (*PASSWORDS, *map(quote, PASSWORDS), *map(quote_plus, PASSWORDS)):
        if ("@" in password and not form.rpartition("{}")[2].startswith("@")) or (
            ":" in password and "//{}" in form
        ):
            continue  # that is another URL, and a good one: behind an @ is a host
        url = form.replace("{}", password)
        assert SECRET not in urls.redact_url(url), url
        for error in (ValueError(url), ValueError(repr(url)), OSError(f"{password!r} is bad")):
            assert SECRET not in urls.remove_url_secrets(str(error), url), (url, error)
        assert SECRET not in attempt(url), url


def attempt(url: str) -> str:
    """What is said of a store."""
    try:
        return repr(backend_factory.make_backend(url))
    except VllmopsError as told:
        return f"{told.message} {told.hint} {told!r} {told.__cause__}"


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=8, max_size=40))
@example("@/:#?&=%")
@example("aaaa@bbbb")
@example("h:1/0?db=")
def test_no_password_that_somebody_thinks_of_is_shown(password: str) -> None:
    for form in FORMS:
        if "{}@" not in form and "={}" not in form:
            continue
        if "//{}@" in form and ":" in password:
            continue  # what is before the colon is a user's name
        plain = form.replace("{}", "")
        url = form.replace("{}", password)
        told = urls.redact_url(url)
        # Each part that is long enough to be no chance.
        for start in range(len(password) - 4):
            part = password[start : start + 5]
            assert part in plain or part not in told, (url, told, part)


@pytest.mark.parametrize("password", PASSWORDS)
def test_a_driver_that_repeats_a_url_tells_no_password(password: str) -> None:
    for raw in (password, quote(password, safe="")):
        url = f"postgresql://u:{raw}@h/d?password={raw}"
        for text in (
            f"invalid DSN: {url!r}",
            f'password "{password}" is wrong',
            f"{{'password': {password!r}}}",
            json.dumps({"dsn": url}),
            f"invalid literal for int() with base 10: {raw.rpartition(':')[2] + '@h'!r}",
        ):
            assert SECRET not in urls.remove_url_secrets(text, url), text


def test_url_parts_without_secrets_stay() -> None:
    for url in (
        "redis://h:6379/0?namespace=blue&wait_replicas=1",
        "redis+sentinel://h1:1,h2:2/main",
        "postgresql://postgres@h/d?sslmode=disable",
        "postgresql://u@h1:1,[::1]:2/d?target_session_attrs=read-write",
        "sqlite:////srv/a b.db",
        "memory://",
        "none",
        "some.db",
    ):
        assert urls.redact_url(url) == url
        assert urls.remove_url_secrets("connection to h:6379 was refused", url) == (
            "connection to h:6379 was refused"
        )
    assert urls.redact_url("postgresql://u:p@h:1/d") == "postgresql://u:…@h:1/d"
    assert urls.redact_url("mysql://u:a/b@h") == "mysql://u:…@h"
    assert urls.redact_url("redis://u:pa@S@host:1") == "redis://u:…@host:1"
    told = urls.remove_url_secrets("Error 111 connecting to h:6379.", "redis://u:p@h:6379/0")
    assert told == "Error 111 connecting to h:6379."


GOOD = [
    "memory://",
    "sqlite:///a.db",
    "sqlite:////srv/a.db",
    "sqlite:///~/a.db",
    "sqlite:///a.db?namespace=x",
    "postgresql://",
    "postgresql:///d",
    "postgresql://h",
    "postgresql://u:p%40@h:1/d?sslmode=disable&application_name=x",
    "postgresql://[::1]:1/d",
    "postgresql://%2Frun%2Fpostgresql/d",
    "postgresql://h1:1,h2:2/d?target_session_attrs=read-write",
    "postgres:///d?host=/run&user=u",
    "redis://h",
    "redis://[::1]:1/15",
    "redis://:p@h:1?db=2&protocol=2",
    "rediss://h?ssl_cert_reqs=none",
    "redis://h?namespace=x&wait_replicas=2",
    "redis+sentinel://h/main",
    "valkey+sentinel://u:p@h1:1,h2:2/my-main.1/3?sentinel_password=x",
    "rediss+sentinel://h/main?ssl_cert_reqs=none",
    "redis+cluster://h1,h2:2",
    "valkeys+cluster://h1:1?namespace=x",
]
BAD = [
    "",
    " ",
    "foo",
    "/srv/a.db",
    "./a.db",
    "memory:",
    "memory://x",
    "sqlite:",
    "sqlite:a.db",
    "sqlite://a.db",
    "sqlite:/a.db",
    "sqlite://",
    "sqlite:///",
    "sqlite:///a/",
    "sqlite:///:memory:",
    "sqlite:///a.db?mode=ro",
    "mysql://h/d",
    "http://h",
    "redis",
    "redis:h",
    "redis:/h",
    "redis://h:notaport",
    "redis://h:0",
    "redis://h:65536",
    "redis://h:-1",
    "redis://h:\u0661",
    "redis://h:1:2",
    "redis://[::1",
    "redis://::1",
    "redis://h/x",
    "redis://h/0/1",
    "redis://h?db=x",
    "redis://h?databse=1",
    "redis://h?wait_replicas=x",
    "redis://h?wait_replicas=-1",
    "redis://h?namespace=",
    "redis://h?namespace=A-b",
    "redis://h?namespace=a&namespace=b",
    "redis://h?namespace",
    "redis://h#x",
    "redis://h1,h2",
    "redis://h\n",
    "redis://u:p@q@h",
    "postgresql://h/d?sslmode=perhaps",
    "postgresql://h/d?target_session_attrs=best",
    "redis://h?ssl_cert_reqs=none",
    "rediss://h?ssl_cert_reqs=perhaps",
    "redis+sentinel://h",
    "redis+sentinel://h/",
    "redis+sentinel://h,/main",
    "redis+sentinel:///main",
    "redis+sentinel://h:x/main",
    "redis+cluster://h/1",
    "redis+cluster://h?db=1",
    "redis+cluster://",
    "redis+other://h",
    "postgresql+asyncpg://h/d",
    "postgresql://[::1",
    "postgresql://h:x/d",
    "postgresql://h1:1,h2:x/d",
    "postgresql://h1,,h2/d",
    "postgresql://h/d?sslmod=disable",
    "postgresql://h/d?sslmode",
    "postgresql://u:p@q@h/d",
    "postgresql://u:a/b@h/d",
    "postgresql://h//d",
]


@pytest.mark.parametrize("url", GOOD)
def test_a_store_that_can_be(url: str) -> None:
    settings.validate_settings({STORE: url})
    backend_factory.make_backend(url)


@pytest.mark.parametrize("url", BAD)
def test_a_store_that_can_not_be(url: str) -> None:
    with pytest.raises(VllmopsError) as told:
        backend_factory.make_backend(url)
    assert (told.value.code, told.value.exit_code) == ("usage", 2)
    assert told.value.hint
    assert "://" in told.value.hint or "?" in told.value.hint or "one of" in told.value.hint


def test_a_file_is_told_how_it_is_written() -> None:
    with pytest.raises(VllmopsError) as told:
        backend_factory.make_backend("/srv/a.db")
    assert told.value.hint == "sqlite:////srv/a.db"


@pytest.mark.parametrize("url", ["redis://h:notaport", "postgresql://[::1", "foo", "", "sqlite:"])
def test_all_commands_refuse_the_same_invalid_urls(vllmops: Any, url: str) -> None:
    for words in (
        ("responses", "check-store", url),
        ("responses", "list", "--store", url),
        ("serve", "m", "--store", url),
        ("serve", "m", "--store", url, "--dry-run"),
    ):
        answer = vllmops(*words, "--json")
        assert (answer.code, answer.error["code"]) == (2, "usage"), words
        assert (
            "is not a store URL" in answer.error["message"]
            or url.partition(":")[0] in answer.error["message"]
        ), words


def test_a_dry_run_shows_no_password(vllmops: Any) -> None:
    for url in (f"postgresql://u:{SECRET}@h/d", f"redis://h?password={SECRET}"):
        for more in ((), ("--json",)):
            answer = vllmops("serve", "m", "--store", url, "--dry-run", *more)
            assert answer.code == 0
            assert "://" in answer.out
            assert SECRET not in answer.out + answer.err


def test_a_target_with_a_password(vllmops: Any) -> None:
    for target in (
        f"http://u:{SECRET}@127.0.0.1:1",
        f"http://u:{SECRET}@h:x",
        f"http://{SECRET}@:",
    ):
        for words in (("responses", "list"), ("doctor",), ("cache", "inspect")):
            answer = vllmops(*words, "-t", target, "--json")
            assert answer.code
            assert SECRET not in answer.out + answer.err, words


def test_a_certificate_without_tls_names_the_scheme(vllmops: Any) -> None:
    url = "redis+cluster://h?ssl_ca_certs=/ca.crt"
    answer = vllmops("responses", "list", "--store", url, "--json")
    assert answer.code == 2
    assert "needs rediss+cluster://" in answer.error["message"]


def test_sentinels_that_nobody_reaches_are_named_in_one_line(vllmops: Any) -> None:
    answer = vllmops("responses", "list", "--store", "redis+sentinel://127.0.0.1:1/main", "--json")
    assert answer.code == 5
    assert "connecting to 127.0.0.1:1" in answer.error["message"]
    assert "redis.asyncio" not in answer.error["message"]


def test_errors_of_real_drivers_contain_no_password() -> None:
    """Each of them is asked with a URL of which it makes something else than we do."""

    async def read_error_text(url: str) -> str:
        with pytest.raises((StoreUnavailable, VllmopsError)) as error:
            async with ResponseStore(backend_factory.make_backend(url, Limits())) as store:
                await store.get("", "r")
        return f"{error.value} {error.value.message} {error.value.hint}"

    for url in (
        f"redis://u:{SECRET}@127.0.0.1:1",
        f"redis://127.0.0.1:1?password={SECRET}",
        f"redis+sentinel://u:{SECRET}@127.0.0.1:1,127.0.0.1:2/main?sentinel_password={SECRET}",
        f"redis+cluster://u:{SECRET}@127.0.0.1:1",
        f"postgresql://u:{SECRET}@127.0.0.1:1/d",
        f"postgresql://u:{SECRET}@127.0.0.1:1,127.0.0.1:2/d",
        f"postgresql://127.0.0.1:1/d?password={SECRET}&ssl_min_protocol_version={SECRET}",
    ):
        assert SECRET not in asyncio.run(read_error_text(url)), url
