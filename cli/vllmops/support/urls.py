"""URLs of stores and servers: checked, and shown without a password.

A URL that is not as it should be is not taken apart to be shown: whatever can't be proved harmless
becomes ``…``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn
from urllib.parse import parse_qsl, quote, unquote, unquote_plus

from .errors import make_usage_error

MARK = "…"
NAMESPACE = "namespace"
WAIT_REPLICAS = "wait_replicas"
SENTINEL, CLUSTER = "+sentinel", "+cluster"
REDIS = ("redis", "rediss")
# Valkey speaks what Redis speaks.
ALIASES = {"postgres": "postgresql", "valkey": "redis", "valkeys": "rediss"}
ENCODE = "in a user's name or a password write @ as %40, / as %2F, : as %3A, # as %23, ? as %3F"
FORMS = {
    "memory": "memory://",
    "sqlite": "sqlite:///FILE in the current directory, sqlite:////PATH/FILE; in a name write ? as "
    "%3F, # as %23, % as %25",
    "postgresql": "postgresql://USER:PASSWORD@HOST:5432/DATABASE or postgresql://HOST1:5432,"
    f"HOST2:5432/DATABASE; {ENCODE}",
    "redis": f"redis://USER:PASSWORD@HOST:6379/0; {ENCODE}",
    SENTINEL: "redis+sentinel://USER:PASSWORD@SENTINEL1:26379,SENTINEL2:26379/SERVICE/0; " + ENCODE,
    CLUSTER: f"redis+cluster://USER:PASSWORD@HOST1:6379,HOST2:6379; {ENCODE}",
}
EVERY_FORM = (
    "memory://, sqlite:///FILE, postgresql://HOST/DATABASE, redis://HOST, "
    "redis+sentinel://HOST,HOST/SERVICE or redis+cluster://HOST,HOST"
)
# What asyncpg takes, and settings of the server that a client may want.
POSTGRESQL_QUERY = (
    "host port user password passfile database dbname service sslmode sslcert sslkey "
    "sslrootcert sslcrl sslpassword sslnegotiation ssl_min_protocol_version "
    "ssl_max_protocol_version target_session_attrs krbsrvname gsslib application_name "
    "search_path statement_timeout lock_timeout idle_in_transaction_session_timeout "
    "synchronous_commit work_mem timezone options"
)
# What redis-py takes for a connection.
REDIS_QUERY = (
    "db username password client_name protocol socket_timeout socket_connect_timeout "
    "socket_read_size socket_keepalive health_check_interval timeout retry_on_timeout "
    "max_connections ssl_keyfile ssl_certfile ssl_cert_reqs ssl_ca_certs ssl_ca_data "
    "ssl_ca_path ssl_check_hostname ssl_password ssl_min_version ssl_ciphers "
    "ssl_include_verify_flags ssl_exclude_verify_flags"
)
KNOWN = {
    "postgresql": frozenset(POSTGRESQL_QUERY.split()),
    "redis": frozenset(REDIS_QUERY.split()) | {WAIT_REPLICAS},
}
KNOWN[SENTINEL] = KNOWN["redis"] | {"sentinel_username", "sentinel_password"}
# What is shown of a query has one of these names: what has none may be a part of a password.
NAMES = frozenset[str]().union(*KNOWN.values(), {NAMESPACE, "passwd", "pass", "auth", "token"})
# Of these the values are shown, too: what they have to be, and an example.
HARMLESS = {
    NAMESPACE: ("[a-z][a-z0-9_]{0,30}", "blue, in lower-case letters, digits and _"),
    WAIT_REPLICAS: ("[0-9]{1,2}", "1"),
    "db": ("[0-9]{1,5}", "0"),
    "sslmode": ("disable|allow|prefer|require|verify-ca|verify-full", "require"),
    "target_session_attrs": (
        "any|primary|standby|read-write|read-only|prefer-standby",
        "read-write",
    ),
}

URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
REST = re.compile(
    r"(?:(?P<userinfo>[^@/?#]*)@)?(?P<hosts>[^@/?#]*)(?P<path>/[^@?#]*)?"
    r"(?:\?(?P<query>[^#]*))?(?P<fragment>#.*)?",
    re.DOTALL,
)
HOST = re.compile(
    r"(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|(?:[\w.-]|%[0-9A-Fa-f]{2})*)(?::([0-9]{1,5}))?"
)
PLAIN = re.compile(r"[\w.~/ -]*")
NAME = re.compile("[a-z][a-z0-9_]{0,30}")
# What is a part of a URL, and of nothing else, has a letter or a digit.
HIDES = re.compile(r"\w")
# Of what is shorter than that, only whole words are taken out of a text.
SHORT = 4


class StoreUrl(NamedTuple):
    """A store's URL, taken apart.

    Args:
        scheme: ``memory``, ``sqlite``, ``postgresql``, ``redis`` or ``rediss``.
        topology: `SENTINEL`, `CLUSTER`, or empty.
        userinfo: as it was written.
        hosts: each with its port, None where none was given.
        path: with the slash it begins with.
        query: by name.
    """

    scheme: str
    topology: str
    userinfo: str
    hosts: tuple[tuple[str, int | None], ...]
    path: str
    query: dict[str, str]


def make_sqlite_url(path: Path) -> str:
    """The URL of a store in a file.

    Args:
        path: absolute; whatever is in a name.
    """
    return f"sqlite:///{quote(os.fsencode(path))}"


def resolve_store_url(folder: Path, url: str) -> str:
    """The URL, valid everywhere, of a store as a process names it whose current directory that is.

    Args:
        folder: absolute.
        url: of any store; only the file of one may be relative.
    """
    start, mark, query = url.partition("?")
    scheme, _, name = start.partition(":///")
    if scheme.lower() != "sqlite" or not name or name.startswith(("/", "~")):
        return url
    return f"{make_sqlite_url(folder)}/{name}{mark}{query}"


def parse_store_url(url: str) -> StoreUrl:
    """A store's URL, taken apart and checked; nobody is asked whether anything is there.

    Raises:
        VllmopsError: ``usage``, with the form that it should have.
    """
    found = URL.fullmatch(url)
    if found is None:
        hint = f"sqlite:///{url}" if can_be_file_path(url) else EVERY_FORM
        reject_url(f"{redact_url(url)!r} is not a store URL", hint)
    written, _, way = found["scheme"].lower().partition("+")
    scheme, way = ALIASES.get(written, written), f"+{way}" if way else ""
    kind = "redis" if scheme in REDIS else scheme
    if kind not in FORMS or (way and (kind != "redis" or way not in {SENTINEL, CLUSTER})):
        reject_url(f"{redact_url(url)!r} is not a store URL", EVERY_FORM)
    form, who = FORMS[way or kind], redact_url(url)
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in url):
        reject_url(f"{who!r} contains a control character", form)
    start, _, asked = found["rest"].partition("?")
    if kind in {"memory", "sqlite"}:
        query = parse_query(asked, frozenset(), who, form)
        if kind == "memory" and start:
            reject_url(f"{who!r} must be memory:// alone: each process has its own", form)
        if kind == "sqlite" and (not start.startswith("/") or start.endswith(("/", "/:memory:"))):
            reject_url(f"{who!r} does not name a file", form)
        return StoreUrl(scheme, way, "", (), start, query)
    parts = REST.fullmatch(found["rest"])
    if parts is None or parts["fragment"] or (parts["path"] or "").count("//"):
        reject_url(f"{who!r} is not a valid URL", form)
    hosts = tuple(parse_host(part, who, form) for part in parts["hosts"].split(","))
    query = parse_query(asked, KNOWN.get(way, KNOWN[kind]), who, form)
    path = parts["path"] or ""
    if kind == "redis":
        validate_redis_url(way, path, query, who, form)
        if scheme == "redis" and (tls := [name for name in query if name.startswith("ssl_")]):
            reject_url(f"{who!r}: {tls[0]} is for TLS, which needs rediss{way}://", form)
    several = len(hosts) > 1
    if several and kind == "redis" and not way:
        reject_url(f"{who!r} names several hosts", f"{FORMS[SENTINEL]}; or {FORMS[CLUSTER]}")
    if (several or way) and not all(name for name, _ in hosts):
        reject_url(f"{who!r} has no host", form)
    return StoreUrl(scheme, way, parts["userinfo"] or "", hosts, path, query)


def can_be_file_path(text: str) -> bool:
    """Whether somebody may have meant a file."""
    return bool(text) and bool(PLAIN.fullmatch(text)) and ("/" in text or text.endswith(".db"))


def parse_query(text: str, names: frozenset[str], redacted_url: str, form: str) -> dict[str, str]:
    """The parameters of a URL.

    Raises:
        VllmopsError: ``usage``.
    """
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text))
    except ValueError:
        reject_url(f"{redacted_url!r} has a parameter that is not NAME=VALUE", form)
    known = names | {NAMESPACE}
    for index, (name, value) in enumerate(pairs):
        if name not in known:
            # It may be the rest of a password with a ? or an & in it.
            harmless = "@" not in text and all(before in HARMLESS for before, _ in pairs[:index])
            called = repr(name) if harmless and NAME.fullmatch(name) else "a parameter"
            listed = ", ".join(sorted(known))
            reject_url(
                f"{redacted_url!r}: unknown parameter for this kind of store: {called}",
                f"one of {listed}",
            )
        if name in HARMLESS and not re.fullmatch(HARMLESS[name][0], value):
            reject_url(f"{redacted_url!r}: invalid value of {name}", f"?{name}={HARMLESS[name][1]}")
    query = dict(pairs)
    if len(query) < len(pairs):
        reject_url(f"{redacted_url!r} has a parameter twice", form)
    return query


def validate_redis_url(
    topology: str, path: str, query: dict[str, str], redacted_url: str, form: str
) -> None:
    """Refuse a path, or a count of replicas, that can't be.

    Raises:
        VllmopsError: ``usage``.
    """
    database = "(/[0-9]{1,5})?"
    wanted = {SENTINEL: f"/[A-Za-z0-9_.-]+{database}", CLUSTER: "/?0?"}.get(
        topology, f"{database}/?"
    )
    if not re.fullmatch(wanted, path):
        what = {SENTINEL: "a service's name", CLUSTER: "no database but 0"}
        reject_url(
            f"{redacted_url!r}: after the hosts, expected "
            f"{what.get(topology, 'the number of a database')}",
            form,
        )
    if topology == CLUSTER and query.get("db", "0") != "0":
        reject_url(f"{redacted_url!r}: a cluster has no database but 0", form)


def parse_host(text: str, redacted_url: str, form: str) -> tuple[str, int | None]:
    """A host and its port.

    Raises:
        VllmopsError: ``usage``.
    """
    found = HOST.fullmatch(text)
    if found is None or (found[2] and not 0 < int(found[2]) < 1 << 16):
        reject_url(
            f"{redacted_url!r}: invalid host or port; a port is a number from 1 to 65535", form
        )
    return unquote(found[1].strip("[]")), int(found[2]) if found[2] else None


def reject_url(message: str, hint: str) -> NoReturn:
    # Not the driver's own message: it may contain the password.
    raise make_usage_error(message, hint) from None


def redact_url(url: str) -> str:
    """A URL without anything that is secret in it, or could be."""
    found = URL.fullmatch(url)
    if found is None:
        begun = re.match(r"[a-z][a-z+]{0,20}:(?=/)", url)
        return url if PLAIN.fullmatch(url) else f"{begun[0] if begun else ''}{MARK}"
    scheme, rest = found["scheme"], found["rest"]
    start, mark, query = rest.partition("?")
    if "#" in rest:
        return f"{scheme}://{MARK}"
    if scheme == "sqlite" and "@" not in rest:
        return f"{scheme}://{start}{mark}{redact_query(query) if query else ''}"
    parts = REST.fullmatch(rest)
    if parts is None and not re.search("[?=&]", rest):
        # An @ that is not written as %40: what is behind the last one is no password.
        before, _, after = rest.rpartition("@")
        return f"{scheme}://{redact_user(before, scheme)}{redact_location(after)}"
    if parts is None or any(
        "@" in parameter and "pass" not in get_known_name(parameter)
        for parameter in query.split("&")
    ):
        return f"{scheme}://{MARK}"
    text = "" if parts["userinfo"] is None else redact_user(parts["userinfo"], scheme)
    return f"{scheme}://{text}{redact_location(parts['hosts'] + (parts['path'] or ''))}" + (
        f"?{redact_query(query)}" if query else ""
    )


def redact_user(userinfo: str, scheme: str) -> str:
    user, colon, password = userinfo.partition(":")
    # A token often stands where the user should.
    lone = bool(user) and not password
    if not re.fullmatch(r"[\w.+-]*", user) or (lone and scheme not in {"postgresql", "postgres"}):
        return f"{MARK}@"
    return f"{user}:{MARK}@" if colon else f"{user}@"


def redact_location(location: str) -> str:
    """Hosts and path."""
    hosts, slash, path = location.partition("/")
    # Where no host is before a port, or the port is none, somebody left the host out.
    found = [HOST.fullmatch(found_host) for found_host in hosts.split(",")]
    if not all(
        found_host and (found_host[1] or not found_host[2]) and int(found_host[2] or 0) < 1 << 16
        for found_host in found
    ):
        first, _, rest = hosts.partition(":")
        return f"{first}:{MARK}" if rest and re.fullmatch(r"[\w.-]+", first) else MARK
    return f"{hosts}{slash}{path if PLAIN.fullmatch(path) else MARK}"


def redact_query(query: str) -> str:
    return "&".join(redact_parameter(parameter) for parameter in query.split("&"))


def redact_parameter(text: str) -> str:
    name, _, value = text.partition("=")
    if name in HARMLESS and re.fullmatch(HARMLESS[name][0], value):
        return text
    return f"{name}={MARK}" if get_known_name(text) else MARK


def get_known_name(parameter: str) -> str:
    """Its name, where it is one that is known; else it may be a part of a password."""
    name, mark, _ = parameter.partition("=")
    return name if mark and name in NAMES else ""


def remove_url_secrets(text: str, url: str) -> str:
    """A text, a driver's message say, in which nothing is left that is secret in a URL."""
    for secret in sorted(find_url_secrets(url), key=len, reverse=True):
        if len(secret) >= SHORT:
            text = text.replace(secret, MARK)
        else:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", MARK, text)
    return text


def find_url_secrets(url: str) -> set[str]:
    """What must not be shown of a URL, in each form that a message may have it."""
    safe = redact_url(url)
    if safe == url:
        return set()
    # Whoever takes it apart in another way may tell any part of it.
    pieces = {url}
    for cut in ("://", "@", ":", "?", "#", "&", "=", "/", None):
        pieces |= {half for piece in pieces for half in list_pieces(piece, cut)}
    seen = set(re.split(r"[@:/?#&=,]", safe))
    forms = {form for piece in pieces for form in (piece, unquote(piece), unquote_plus(piece))}
    forms |= {form for piece in forms for form in (repr(piece)[1:-1], json.dumps(piece)[1:-1])}
    return {
        piece for piece in forms if piece not in safe and piece not in seen and HIDES.search(piece)
    }


def list_pieces(text: str, cut: str | None) -> Iterator[str]:
    """A text, what is before and behind the first and the last cut, and each part."""
    yield text
    if cut is None or cut in text:
        for part in (text.split(cut, 1), text.rsplit(cut, 1), text.split(cut)):
            yield from part
