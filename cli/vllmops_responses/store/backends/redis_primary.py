"""Which Redis server takes writes now: the one of the URL, or who Sentinels or a cluster name.

The three differ in how they find the address, by redis-py's own clients; a connection to it is the
same for all.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import redis.asyncio as driver
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

from vllmops.support.urls import (
    CLUSTER,
    FORMS,
    SENTINEL,
    WAIT_REPLICAS,
    StoreUrl,
    redact_url,
    reject_url,
)

from .connection_pool import ConnectionPool

if TYPE_CHECKING:
    Connection: TypeAlias = driver.Connection

Address: TypeAlias = tuple[str, int]

PORT, SENTINEL_PORT = 6379, 26379
# One for calls that are gathered, the rest for what may take long.
CONNECTIONS = 4
# Less than a call may take, so that one that is silent leaves time for another.
ASK_S = 0.5
# A primary that was replaced may live on and not know it: how often Sentinels are asked.
LOOK_S = 1.0
SENTINEL_ONLY = ("sentinel_username", "sentinel_password")
# What parameters of a URL tell the driver's own pool, or us.
NOT_OF_CONNECTIONS = ("max_connections", "timeout", "retry_on_timeout", "socket_timeout")
# RedisClusterException is no RedisError.
TROUBLE = (OSError, RedisError, RedisClusterException)


class DiscoveringConnection:
    """A connection that looks for its server each time it connects.

    Args:
        source: knows the server.
        options: as redis-py has them.
    """

    def __init__(self, source: ConnectionSource, **options: Any) -> None:
        super().__init__(**options)
        self.source = source

    async def connect(self) -> None:
        here: Any = self
        if not here.is_connected:
            self.source.has_no_replica = True
            try:
                here.host, here.port = await self.source.find_address()
                await super().connect()  # type: ignore[misc]
            except TROUBLE:
                self.source.invalidate_address()
                raise

    async def disconnect(self, *_: Any, **given: Any) -> None:
        """Let go of it, and wait for nobody: the server may be silent."""
        await super().disconnect(**{**given, "nowait": True})  # type: ignore[misc]


class PlainConnection(DiscoveringConnection, driver.Connection):
    pass


class TlsConnection(DiscoveringConnection, SSLConnection):
    pass


class ConnectionSource(ABC):
    """Where connections come from: redis-py's pool of those to the server that takes writes.

    Args:
        options: what redis-py makes a connection with, but for the address.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.tls = options.pop("connection_class", None) is SSLConnection
        self.options = options
        # A call that was sent twice would find its own doing: whether to try again is the caller's,
        # as is how long it may take.
        given = {**options, "socket_timeout": None, "retry": Retry(NoBackoff(), 0)}
        kind: Any = driver.ConnectionPool
        self.driver_pool = kind(
            connection_class=TlsConnection if self.tls else PlainConnection, source=self, **given
        )
        self.driver_pool.make_connection()  # so that what it does not take is refused now
        self.pool = ConnectionPool(
            self.connect, is_usable, driver.Connection.disconnect, CONNECTIONS
        )
        # For what is seldom asked.
        self.client = driver.Redis.from_pool(self.driver_pool)
        # Whether the server is taken to have no replica: who waits for one looks first.
        self.has_no_replica = True

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Connection]:
        """A connection, which is not used again after any trouble."""
        if await self.has_moved():
            await self.close_all()
        async with self.pool.lend() as connection:
            yield connection

    async def connect(self) -> Connection:
        connection: Any = self.driver_pool.make_connection()
        await connection.connect()
        return connection  # type: ignore[no-any-return]

    async def close_all(self) -> None:
        """Let go of all connections; of one that is in use when that is over."""
        await self.pool.close_all()
        await self.driver_pool.disconnect(inuse_connections=False)

    async def abandon_server(self) -> None:
        """Use none of these any more, the one that is in use included: look for the server anew."""
        self.invalidate_address()
        await self.close_all()

    @abstractmethod
    async def find_address(self) -> Address:
        """Of the server that takes writes now, as far as is known."""

    async def has_moved(self) -> bool:
        """Whether it became another one, asked now and then."""
        return False

    def invalidate_address(self) -> None:  # noqa: B027 - most look each time
        """Look anew for the server: that one does not take writes."""

    async def is_still_primary(self, _: Connection) -> bool:
        """Whether the server of a connection certainly is still the one that takes writes."""
        return False

    async def close(self) -> None:
        await self.pool.close_all()
        await self.client.aclose(close_connection_pool=True)


class StandaloneSource(ConnectionSource):
    """One server, or whatever stands at its address."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.address = options.pop("host", "localhost"), options.pop("port", PORT)
        super().__init__(options)

    async def find_address(self) -> Address:
        return self.address


class SentinelSource(ConnectionSource):
    """A primary and its replicas, among which Sentinels choose."""

    def __init__(self, options: dict[str, Any], hosts: list[Address], service: str) -> None:
        asked = {name.removeprefix("sentinel_"): options.pop(name, None) for name in SENTINEL_ONLY}
        super().__init__(options)
        self.service = service
        given = {**options, "ssl": self.tls}
        asked |= {name: value for name, value in given.items() if name.startswith("ssl")}
        asked |= {"socket_timeout": ASK_S, "socket_connect_timeout": ASK_S}
        self.sentinel = Sentinel(  # type: ignore[no-untyped-call]
            hosts, sentinel_kwargs={**asked, "retry": Retry(NoBackoff(), 0)}
        )
        self.known_address: Address | None = None
        self.checked_at = 0.0

    async def find_address(self) -> Address:
        self.checked_at = time.monotonic()
        try:
            host, port = await self.sentinel.discover_master(self.service)
        except MasterNotFoundError:
            # It shows every setting of its clients, and not what they met.
            states = await self.fetch_states()
            trouble = [state for state in states if isinstance(state, TROUBLE)]
            if len(trouble) == len(states):
                raise trouble[0] from None
            raise MasterNotFoundError(f"No master found for {self.service!r}") from None
        self.known_address = host, port
        return host, port

    async def has_moved(self) -> bool:
        if time.monotonic() - self.checked_at < LOOK_S:
            return False
        before = self.known_address
        try:
            return await self.find_address() != before
        except TROUBLE:  # no Sentinel answers, which harms none of the servers
            return False

    async def fetch_states(self) -> list[Any]:
        """What each Sentinel says of the service, or the error that it met."""
        asked = (sentinel.sentinel_master(self.service) for sentinel in self.sentinel.sentinels)
        return [*await asyncio.gather(*asked, return_exceptions=True)]

    async def is_still_primary(self, connection: Connection) -> bool:
        """By most of the Sentinels, of which none says otherwise or is about to."""
        answers = await self.fetch_states()
        states = [state for state in answers if isinstance(state, dict)]
        here = str(connection.host), int(connection.port)
        return 2 * len(states) > len(answers) and all(
            (state["ip"], state["port"]) == here and "failover_in_progress" not in state["flags"]
            for state in states
        )

    async def close(self) -> None:
        await super().close()
        await self.sentinel.aclose()


class ClusterSource(ConnectionSource):
    """The server of a cluster that has the slot of a store, whose keys are all in one."""

    def __init__(self, options: dict[str, Any], hosts: list[Address], key: str) -> None:
        super().__init__(options)
        self.key = key
        given = {**options, "socket_timeout": ASK_S, "socket_connect_timeout": ASK_S}
        self.cluster = RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in hosts],
            ssl=self.tls,
            **given,
        )
        self.stale = False

    async def find_address(self) -> Address:
        await self.cluster.initialize()
        if self.stale:
            await self.cluster.nodes_manager.initialize()
            self.stale = False
        node: Any = self.cluster.get_node_from_key(self.key)
        return node.host, int(node.port)

    def invalidate_address(self) -> None:
        self.stale = True

    async def is_still_primary(self, connection: Connection) -> bool:
        # A server of a cluster refuses calls for a slot that it has lost, as soon as it knows.
        self.invalidate_address()
        return await self.find_address() == (connection.host, connection.port)

    async def close(self) -> None:
        await super().close()
        await self.cluster.aclose()


async def is_usable(connection: Connection) -> bool:
    """Whether a connection is open, and the answer to each call that came on it is read."""
    try:
        return not await connection.can_read()
    except (OSError, RedisError):
        return False


def make_connection_source(url: str, parts: StoreUrl, key: str) -> ConnectionSource:
    """Where the connections for a URL come from.

    Args:
        url: of the store.
        parts: the same, taken apart.
        key: which in a cluster is in the slot of the store.

    Raises:
        VllmopsError: ``usage``, where the driver can't read a parameter.
    """
    try:
        options: dict[str, Any] = dict(parse_url(make_single_host_url(url, parts)))
        for name in (*NOT_OF_CONNECTIONS, WAIT_REPLICAS):
            options.pop(name, None)
        if not parts.topology:
            return StandaloneSource(options)
        del options["host"]
        if parts.topology == CLUSTER:
            options.pop("db", None)
            return ClusterSource(options, [(host, port or PORT) for host, port in parts.hosts], key)
        hosts = [(host, port or SENTINEL_PORT) for host, port in parts.hosts]
        return SentinelSource(options, hosts, parts.path.split("/")[1])
    except (ValueError, TypeError, RedisError):
        reject_url(
            f"{redact_url(url)!r} has an invalid parameter", FORMS[parts.topology or "redis"]
        )


def make_single_host_url(url: str, parts: StoreUrl) -> str:
    """A URL as if it were of one server, for redis-py to read all but the hosts."""
    if not parts.topology:
        return url
    user = f"{parts.userinfo}@" if parts.userinfo else ""
    path = f"/{parts.path.split('/')[-1]}" if parts.path.count("/") > 1 else ""
    return f"{parts.scheme}://{user}h{path}?{url.partition('?')[2]}"


def parse_wait_replicas(parts: StoreUrl) -> tuple[int, bool]:
    """How many replicas have to have a write, and whether also where that many are not there."""
    if (given := parts.query.get(WAIT_REPLICAS)) is not None:
        return int(given), True
    return (1 if parts.topology in {SENTINEL, CLUSTER} else 0), False
