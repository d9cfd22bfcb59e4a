"""URLs of stores and servers: checked, and shown without a password.

A URL that is not as it should be is not taken apart to be shown: whatever can't be proved harmless
becomes ``…``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, NoReturn
from urllib.parse import parse_qsl, unquote, unquote_plus

from ..errors import Exit, VllmopsError

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
    "sqlite": "sqlite:///FILE in the current directory, sqlite:////PATH/FILE",
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
POSTGRESQL_QUERY = frozenset(
    [
        "host",
        "port",
        "user",
        "password",
        "passfile",
        "database",
        "dbname",
        "service",
        "sslmode",
        "sslcert",
        "sslkey",
        "sslrootcert",
        "sslcrl",
        "sslpassword",
        "sslnegotiation",
        "ssl_min_protocol_version",
        "ssl_max_protocol_version",
        "target_session_attrs",
        "krbsrvname",
        "gsslib",
        "application_name",
        "search_path",
        "statement_timeout",
        "lock_timeout",
        "idle_in_transaction_session_timeout",
        "synchronous_commit",
        "work_mem",
        "timezone",
        "options",
    ]
)
# What redis-py takes for a connection.
REDIS_QUERY = frozenset(
    [
        "db",
        "username",
        "password",
        "client_name",
        "protocol",
        "socket_timeout",
        "socket_connect_timeout",
        "socket_read_size",
        "socket_keepalive",
        "health_check_interval",
        "timeout",
        "retry_on_timeout",
        "max_connections",
        "ssl_keyfile",
        "ssl_certfile",
        "ssl_cert_reqs",
        "ssl_ca_certs",
        "ssl_ca_data",
        "ssl_ca_path",
        "ssl_check_hostname",
        "ssl_password",
        "ssl_min_version",
        "ssl_ciphers",
        "ssl_include_verify_flags",
        "ssl_exclude_verify_flags",
    ]
) | {WAIT_REPLICAS}
SENTINEL_QUERY = REDIS_QUERY | {"sentinel_username", "sentinel_password"}
# Of these the values are shown, too.
HARMLESS = {NAMESPACE, WAIT_REPLICAS, "db", "sslmode", "target_session_attrs", "application_name"}

URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
REST = re.compile(
    r"(?:(?P<userinfo>[^@/?#]*)@)?(?P<hosts>[^@/?#]*)(?P<path>/[^@?#]*)?"
    r"(?:\?(?P<query>[^#]*))?(?P<fragment>#.*)?",
    re.DOTALL,
)
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|(?:[\w.-]|%[0-9A-Fa-f]{2})*)(?::(\d{1,5}))?")
PLAIN = re.compile(r"[\w.~/ -]*")
NAME = re.compile("[a-z][a-z0-9_]{0,30}")
# Of what is shorter than that, only whole words are taken out of a text.
SHORT = 4


class StoreUrl(NamedTuple):
    """A store's URL, taken apart.

    Args:
        scheme: ``memory``, ``sqlite``, ``postgresql``, ``redis`` or ``rediss``.
        way: `SENTINEL`, `CLUSTER`, or empty.
        userinfo: as it was written.
        hosts: each with its port, None where none was given.
        path: with the slash it begins with.
        query: by name.
    """

    scheme: str
    way: str
    userinfo: str
    hosts: tuple[tuple[str, int | None], ...]
    path: str
    query: dict[str, str]


def parsed(url: str) -> StoreUrl:
    """A store's URL, taken apart and checked; nobody is asked whether anything is there.

    Raises:
        VllmopsError: ``usage``, with the form that it should have.
    """
    found = URL.fullmatch(url)
    if found is None:
        mend = f"sqlite:///{url}" if is_file(url) else EVERY_FORM
        refuse(f"{shown(url)!r} is no store: a URL is needed", mend)
    written, _, way = found["scheme"].lower().partition("+")
    scheme, way = ALIASES.get(written, written), f"+{way}" if way else ""
    kind = "redis" if scheme in REDIS else scheme
    if kind not in FORMS or (way and (kind != "redis" or way not in {SENTINEL, CLUSTER})):
        refuse(f"{shown(url)!r} is no store", EVERY_FORM)
    form, who = FORMS[way or kind], shown(url)
    if any(ord(each) < 32 or ord(each) == 127 for each in url):
        refuse(f"{who!r} has a control character in it", form)
    start, _, asked = found["rest"].partition("?")
    if kind in {"memory", "sqlite"}:
        query = queried(asked, frozenset(), who, form)
        if kind == "memory" and start:
            refuse(f"{who!r} names something, and memory:// is each process's own", form)
        if kind == "sqlite" and (not start.startswith("/") or start.endswith(("/", "/:memory:"))):
            refuse(f"{who!r} names no file", form)
        return StoreUrl(scheme, way, "", (), start, query)
    parts = REST.fullmatch(found["rest"])
    if parts is None or parts["fragment"] or (parts["path"] or "").count("//"):
        refuse(f"{who!r} can't be read as a URL", form)
    hosts = tuple(host(each, who, form) for each in parts["hosts"].split(","))
    names = {"postgresql": POSTGRESQL_QUERY}.get(kind, REDIS_QUERY)
    query = queried(asked, SENTINEL_QUERY if way == SENTINEL else names, who, form)
    path = parts["path"] or ""
    if kind == "redis":
        check_redis(way, path, query, who, form)
    several = len(hosts) > 1
    if several and kind == "redis" and not way:
        refuse(f"{who!r} names several hosts", f"{FORMS[SENTINEL]}; or {FORMS[CLUSTER]}")
    if (several or way) and not all(name for name, _ in hosts):
        refuse(f"{who!r} lacks a host", form)
    return StoreUrl(scheme, way, parts["userinfo"] or "", hosts, path, query)


def is_file(text: str) -> bool:
    """Whether somebody may have meant a file."""
    return bool(text) and bool(PLAIN.fullmatch(text)) and ("/" in text or text.endswith(".db"))


def queried(text: str, names: frozenset[str], who: str, form: str) -> dict[str, str]:
    """The parameters of a URL.

    Raises:
        VllmopsError: ``usage``.
    """
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text))
    except ValueError:
        refuse(f"{who!r} has a parameter that is no NAME=VALUE", form)
    known = names | {NAMESPACE}
    for index, (name, value) in enumerate(pairs):
        if name not in known:
            # It may be the rest of a password with a ? or an & in it.
            harmless = "@" not in text and HARMLESS.issuperset(each for each, _ in pairs[:index])
            called = repr(name) if harmless and NAME.fullmatch(name) else "a parameter"
            listed = ", ".join(sorted(known))
            refuse(f"{who!r}: such a store does not know {called}", f"one of {listed}")
        if name == NAMESPACE and not NAME.fullmatch(value):
            refuse(
                f"{who!r}: the value of {NAMESPACE} is no namespace",
                f"?{NAMESPACE}=word, a lower-case letter and up to 30 letters, digits or _",
            )
    query = dict(pairs)
    if len(query) < len(pairs):
        refuse(f"{who!r} has a parameter twice", form)
    return query


def check_redis(way: str, path: str, query: dict[str, str], who: str, form: str) -> None:
    """Refuse a path, or a count of replicas, that can't be.

    Raises:
        VllmopsError: ``usage``.
    """
    database = "(/[0-9]{1,5})?"
    wanted = {SENTINEL: f"/[A-Za-z0-9_.-]+{database}", CLUSTER: "/?0?"}.get(way, f"{database}/?")
    if not re.fullmatch(wanted, path):
        what = {SENTINEL: "a service's name", CLUSTER: "no database but 0"}
        refuse(f"{who!r}: behind the hosts goes {what.get(way, 'the number of a database')}", form)
    if not re.fullmatch("[0-9]{1,2}", query.get(WAIT_REPLICAS, "0")):
        refuse(f"{who!r}: {WAIT_REPLICAS} is no number", f"?{WAIT_REPLICAS}=1")
    if way == CLUSTER and query.get("db", "0") != "0":
        refuse(f"{who!r}: a cluster has no database but 0", form)


def host(text: str, who: str, form: str) -> tuple[str, int | None]:
    """A host and its port.

    Raises:
        VllmopsError: ``usage``.
    """
    found = HOST.fullmatch(text)
    if found is None or (found[2] and not 0 < int(found[2]) < 1 << 16):
        refuse(f"{who!r}: a host or its port can't be; a port is a number from 1 to 65535", form)
    return unquote(found[1].strip("[]")), int(found[2]) if found[2] else None


def refuse(message: str, mend: str) -> NoReturn:
    # Not what the driver has said: that may be the password.
    raise VllmopsError("usage", message, mend, exit_code=Exit.USAGE) from None


def shown(url: str) -> str:
    """A URL without anything that is secret in it, or could be."""
    found = URL.fullmatch(url)
    if found is None:
        scheme = re.match(r"[a-z][a-z+]{0,20}:(?=/)", url)
        return url if PLAIN.fullmatch(url) else f"{scheme[0] if scheme else ''}{MARK}"
    scheme, rest = found["scheme"], found["rest"]
    if scheme == "sqlite":
        start, mark, query = rest.partition("?")
        return f"{scheme}://{start}{mark}{shown_query(query)}" if "@" not in start else MARK
    parts = REST.fullmatch(rest)
    if parts is None:
        # An @ that is not written as %40: what is behind the last one is no password, as long as
        # none of it can be a query.
        before, _, after = rest.rpartition("@")
        parts = None if re.search("[?#=&]", before) else REST.fullmatch(after)
        if parts is None:
            return f"{scheme}://{MARK}"
        return f"{scheme}://{shown_user(before, scheme)}@{shown_place(parts)}"
    user = parts["userinfo"]
    return (
        f"{scheme}://{'' if user is None else shown_user(user, scheme) + '@'}{shown_place(parts)}"
    )


def shown_user(userinfo: str, scheme: str) -> str:
    user, colon, password = userinfo.partition(":")
    # A token often stands where the user should.
    lone = bool(user) and not password
    if not re.fullmatch(r"[\w.%+-]*", user) or (lone and scheme not in {"postgresql", "postgres"}):
        return MARK
    return f"{user}:{MARK}" if colon else user


def shown_place(parts: re.Match[str]) -> str:
    """Hosts, path and query."""
    hosts = parts["hosts"]
    # Where no host is before the port, or the port is none, somebody left the host out.
    known = [HOST.fullmatch(each) for each in hosts.split(",")]
    fit = all(each and (each[1] or not each[2]) and int(each[2] or 0) < 1 << 16 for each in known)
    if not fit:
        first = hosts.partition(":")[0]
        safe = ":" in hosts and "," not in hosts and re.fullmatch(r"[\w.-]+", first)
        return f"{first}:{MARK}" if safe else MARK
    path = parts["path"] or ""
    text = hosts + (path if PLAIN.fullmatch(path) else f"/{MARK}")
    if parts["query"] is not None:
        text += f"?{shown_query(parts['query'])}"
    return text + (f"#{MARK}" if parts["fragment"] else "")


def shown_query(query: str) -> str:
    return "&".join(shown_parameter(each) for each in query.split("&")) if query else ""


def shown_parameter(text: str) -> str:
    name, _, value = text.partition("=")
    if name in HARMLESS and re.fullmatch(r"[\w.-]{0,64}", value):
        return text
    known = POSTGRESQL_QUERY | SENTINEL_QUERY | {"passwd", "pass", "auth", "token", "api_key"}
    return f"{name}={MARK}" if name in known else MARK


def without(text: str, url: str) -> str:
    """A text, a driver's message say, in which nothing is left that is secret in a URL."""
    for secret in sorted(set(secrets(url)), key=len, reverse=True):
        if len(secret) >= SHORT:
            text = text.replace(secret, MARK)
        else:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", MARK, text)
    return text


def secrets(url: str) -> Iterator[str]:
    """What must not be told of a URL, in each form that a message may have it."""
    if (safe := shown(url)) == url:
        return
    found = URL.fullmatch(url)
    rest = found["rest"] if found else url
    pieces = [url, rest]
    before, at, _ = rest.rpartition("@")
    if at:
        # Whoever takes it apart in another way may tell any part of it.
        user, _, password = before.partition(":")
        pieces += [before, password, *re.split("[@:/?#&=]", password)]
        pieces += [user] if user not in safe.replace(MARK, "") else []
    start, _, query = rest.partition("?")
    for each in query.split("&"):
        if shown_parameter(each) != each:
            value = each.partition("=")[2] or each
            pieces += [value, unquote_plus(value), *re.split("[@:/?#]", value)]
    parts = REST.fullmatch(rest)
    if not at and (parts is None or parts["hosts"] not in safe):
        pieces += re.split("[:,/]", start)[1:]
    for piece in pieces:
        for each in (piece, unquote(piece)):
            if each and each not in {MARK, safe} and not PLACES.fullmatch(each):
                yield from (each, repr(each)[1:-1])


# What is left of a URL that was cut up: nothing that anybody could mean.
PLACES = re.compile(r"localhost|[\d.]{1,3}|\W+")
