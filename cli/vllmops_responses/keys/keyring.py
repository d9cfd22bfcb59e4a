"""A ring of keys: which one seals, which ones still open. Pure: a change gives another ring."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from enum import StrEnum
from typing import NoReturn

import msgspec

from vllmops.model.keys import KeyMetadata
from vllmops.support.durations import LAST_S, format_lifetime, validate_seconds
from vllmops.support.errors import VllmopsError

VERSION = 1
SECRET_BYTES = 32  # at least
KID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# For how long a carrier may be presented, and a key has to open what it once sealed.
CARRIER_TTL_S = 30 * 24 * 3600
# Servers go on sealing with the key before for a moment, until they have seen the promotion.
LATE_S = 60


class KeyStatus(StrEnum):
    """What a key is used for."""

    NEXT = "next"  # opens; seals once every server has it and it is promoted
    PRIMARY = "primary"  # seals and opens
    VERIFY_ONLY = "verify-only"  # opens what it sealed before
    REVOKED = "revoked"  # nothing; kept to distinguish its carriers from forged ones


# In the order of a key's life.
AGE = {status: age for age, status in enumerate(KeyStatus)}


class Secret:
    """A key's bytes. They can't get into a message, JSON or a pickle by accident."""

    __slots__ = ("_bytes",)

    def __init__(self, content: bytes) -> None:
        self._bytes = content

    def reveal(self) -> bytes:
        """The bytes, for a cipher or for the ring's own file."""
        return self._bytes

    def __repr__(self) -> str:
        return "Secret(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._bytes, other._bytes)

    def __hash__(self) -> int:
        return hash(compute_fingerprint(self))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not to be pickled")


def generate_secret() -> Secret:
    """A new random secret."""
    return Secret(secrets.token_bytes(SECRET_BYTES))


def compute_fingerprint(secret: Secret) -> str:
    """A public name of a secret: 32 hex characters, the same everywhere."""
    return hashlib.sha256(b"vllmops key fingerprint 1\0" + secret.reveal()).hexdigest()[:32]


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key. Times are seconds since the epoch.

    Args:
        kid: its name, which carriers tell; the first characters of its fingerprint.
        status: what it is used for.
        created_at: when it was made or came in, None if that is not known.
        not_after: when it stops opening anything, None for never.
        fingerprint: of the secret.
        secret: 32 bytes or more.

    Raises:
        ValueError: a field makes no sense, or the fingerprint is another secret's.
    """

    kid: str
    status: KeyStatus
    created_at: int | None = None
    not_after: int | None = None
    fingerprint: str
    secret: Secret

    def __post_init__(self) -> None:
        if not KID.fullmatch(self.kid):
            raise ValueError("a kid has 1 to 64 letters, digits, dots, dashes or underscores")
        if len(self.secret.reveal()) < SECRET_BYTES:
            raise ValueError(f"the secret of {self.kid} is shorter than {SECRET_BYTES} bytes")
        if self.fingerprint != compute_fingerprint(self.secret):
            raise ValueError(f"the secret of {self.kid} does not match its fingerprint")
        if not all(0 <= (at or 0) <= LAST_S for at in (self.created_at, self.not_after)):
            raise ValueError(f"a time of {self.kid} is outside 1970 to 9999")

    @classmethod
    def from_secret(cls, secret: Secret, status: KeyStatus, created_at: float | None = None) -> Key:
        """A key around a secret, named after it."""
        mark = compute_fingerprint(secret)
        return cls(
            kid=mark[:8],
            status=status,
            created_at=None if created_at is None else int(created_at),
            fingerprint=mark,
            secret=secret,
        )

    def without_secret(self) -> KeyMetadata:
        """The key without its secret."""
        return KeyMetadata(
            kid=self.kid,
            status=self.status,
            created_at=self.created_at,
            not_after=self.not_after,
            fingerprint=self.fingerprint,
        )

    def is_expired(self, now: float) -> bool:
        """Whether its time is over."""
        return self.not_after is not None and now > self.not_after


class KeyRing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some keys, at most one of them the primary.

    Args:
        version: of the file's format.
        keys: in the order in which they came.

    Raises:
        ValueError: a kid twice, or two primaries.
    """

    version: int = VERSION
    keys: tuple[Key, ...] = ()

    def __post_init__(self) -> None:
        kids = [key.kid for key in self.keys]
        if len(set(kids)) < len(kids):
            raise ValueError("two keys have the same kid")
        if sum(key.status is KeyStatus.PRIMARY for key in self.keys) > 1:
            raise ValueError("two keys are primary")

    @property
    def primary(self) -> Key | None:
        """The key that seals, None if there is none."""
        return next(iter(self.select_keys(KeyStatus.PRIMARY)), None)

    def require_primary(self) -> Key:
        """The key that seals.

        Raises:
            VllmopsError: ``keys.no-primary``.
        """
        if self.primary:
            return self.primary
        raise VllmopsError(
            "keys.no-primary", "the keyring has no primary key", "vllmops keys rotate"
        )

    @property
    def next_key(self) -> Key | None:
        """The key that is to be promoted, the oldest where there are several."""
        return next(iter(self.select_keys(KeyStatus.NEXT)), None)

    def select_keys(self, *statuses: KeyStatus) -> tuple[Key, ...]:
        """The keys of some statuses."""
        return tuple(key for key in self.keys if key.status in statuses)

    def find(self, kid: str) -> Key | None:
        """The key of that name, None if there is none."""
        return next((key for key in self.keys if key.kid == kid), None)

    def get(self, kid: str) -> Key:
        """The key of that name.

        Raises:
            VllmopsError: ``keys.unknown`` (exit code 5).
        """
        if found := self.find(kid):
            return found
        raise VllmopsError(
            "keys.unknown",
            f"no key {kid!r}; the keyring has: "
            + (", ".join(key.kid for key in self.keys) or "none"),
            "vllmops keys list",
        )

    def add(self, key: Key) -> KeyRing:
        """The ring with another key; one that is there already changes nothing.

        Raises:
            VllmopsError: ``keys.same-kid``.
        """
        if known := self.find(key.kid):
            require_same_key(known, key)
            return self
        return KeyRing(keys=(*self.keys, key))

    def promote(self, kid: str, now: float, overlap_s: float) -> KeyRing:
        """The ring with another primary; the one so far opens for a while yet.

        Args:
            kid: a key that is next, or verify-only to go back to it; the primary changes nothing.
            now: seconds since the epoch.
            overlap_s: seconds for which the old primary opens what it sealed.

        Raises:
            VllmopsError: ``keys.unknown``, ``keys.revoked`` for a key that opens nothing, or
                ``usage`` if the overlap is no number of seconds.
        """
        key = self.get(kid)
        if key.status is KeyStatus.REVOKED or key.is_expired(now):
            what = "is revoked" if key.status is KeyStatus.REVOKED else "has expired"
            raise VllmopsError(
                "keys.revoked",
                f"{kid} {what}, and cannot become primary",
                "vllmops keys rotate creates a new key",
            )
        if key.status is KeyStatus.PRIMARY:
            return self
        until = int(now + validate_seconds("the overlap", overlap_s)) + LATE_S
        return self.replace_keys(
            *(
                msgspec.structs.replace(old, status=KeyStatus.VERIFY_ONLY, not_after=until)
                for old in self.select_keys(KeyStatus.PRIMARY)
            ),
            msgspec.structs.replace(key, status=KeyStatus.PRIMARY, not_after=None),
        )

    def retire(self, kid: str, now: float, *, force: bool = False) -> KeyRing:
        """The ring without a key that nobody needs any more.

        Args:
            kid: not the primary.
            now: seconds since the epoch.
            force: take it out though carriers that it sealed may be about.

        Raises:
            VllmopsError: ``keys.unknown``, ``keys.primary`` or ``keys.in-use``.
        """
        key = self.get(kid)
        if key.status is KeyStatus.PRIMARY:
            raise VllmopsError(
                "keys.primary", f"{kid} is the primary key", "vllmops keys rotate, then wait"
            )
        if key.status is KeyStatus.VERIFY_ONLY and not key.is_expired(now) and not force:
            raise VllmopsError(
                "keys.in-use",
                f"conversations sealed with {kid} may continue "
                + (f"for {format_lifetime(key.not_after - now)}" if key.not_after else "for ever")
                + "; without it they are refused",
                "keep it in the keyring until then",
            )
        return KeyRing(keys=tuple(key for key in self.keys if key.kid != kid))

    def revoke(self, kid: str, spare: Key, now: float) -> KeyRing:
        """The ring with a key that opens nothing any more.

        Args:
            kid: any key; of a primary the next one takes the place at once.
            spare: what takes the place where there is no next one.
            now: seconds since the epoch.

        Raises:
            VllmopsError: ``keys.unknown``.
        """
        key = self.get(kid)
        ring = self.replace_keys(msgspec.structs.replace(key, status=KeyStatus.REVOKED))
        if key.status is not KeyStatus.PRIMARY:
            return ring
        heir = ring.without_expired(now).next_key or spare
        return ring.add(heir).replace_keys(
            msgspec.structs.replace(heir, status=KeyStatus.PRIMARY, not_after=None)
        )

    def merge(self, other_keyring: KeyRing) -> KeyRing:
        """The ring with another one's keys, and the later state of each key that both have.

        Where both have a primary of their own, this one's stays, and the other's is next.

        Raises:
            VllmopsError: ``keys.same-kid``.
        """
        keys = {key.kid: key for key in self.keys}
        for key in other_keyring.keys:
            known = keys.get(key.kid)
            if known:
                require_same_key(known, key)
            if known is None or AGE[key.status] > AGE[known.status]:
                keys[key.kid] = key
        if theirs := other_keyring.primary:
            primaries = [key for key in keys.values() if key.status is KeyStatus.PRIMARY]
            if len(primaries) > 1:
                keys[theirs.kid] = msgspec.structs.replace(theirs, status=KeyStatus.NEXT)
            elif not primaries and keys[theirs.kid].status is not KeyStatus.REVOKED:
                keys[theirs.kid] = theirs  # they have gone back to it
        elif (own := self.primary) and keys[own.kid].status is not KeyStatus.REVOKED:
            keys[own.kid] = own  # they know of none that would seal instead
        return KeyRing(keys=tuple(keys.values()))

    def adopt_primary(self, other_keyring: KeyRing, now: float, overlap_s: float) -> KeyRing:
        """The ring merged with another one, and sealing as that one does.

        No key is lost but those that are over; a primary of its own goes on opening.

        Args:
            other_keyring: the ring.
            now: seconds since the epoch.
            overlap_s: seconds for which a primary of its own opens what it sealed.

        Raises:
            VllmopsError: ``keys.same-kid``.
        """
        ring = self.merge(other_keyring).without_expired(now)
        lead = ring.find(other_keyring.primary.kid) if other_keyring.primary else None
        if lead is None or lead.status is KeyStatus.REVOKED or lead.is_expired(now):
            return ring
        return ring.promote(lead.kid, now, overlap_s)

    def without_expired(self, now: float) -> KeyRing:
        """The ring without the keys that open nothing any more and are not revoked."""
        unused = {KeyStatus.NEXT, KeyStatus.VERIFY_ONLY}
        return KeyRing(
            keys=tuple(
                key for key in self.keys if key.status not in unused or not key.is_expired(now)
            )
        )

    def replace_keys(self, *changed: Key) -> KeyRing:
        """The ring with some keys changed, each in its place."""
        by_kid = {key.kid: key for key in changed}
        return KeyRing(keys=tuple(by_kid.get(key.kid, key) for key in self.keys))


def require_same_key(known_key: Key, new_key: Key) -> None:
    """Check that two keys with one kid are one key.

    Raises:
        VllmopsError: ``keys.same-kid``.
    """
    if known_key.fingerprint != new_key.fingerprint:
        raise VllmopsError(
            "keys.same-kid",
            f"two different keys have the kid {known_key.kid}: the keyring's has the fingerprint "
            f"{known_key.fingerprint}, the new one's is {new_key.fingerprint}",
            "use a fresh key instead of the new one: vllmops keys add",
        )


def make_single_key_ring(secret: Secret) -> KeyRing:
    """A ring of one key."""
    return KeyRing(keys=(Key.from_secret(secret, KeyStatus.PRIMARY),))


def parse_hex_secret(text: str, source: str) -> Secret:
    """A secret that somebody wrote down.

    Args:
        text: hex characters, 64 or more; space around them does not count.
        source: where it stands, for the message, which does not show it.

    Raises:
        VllmopsError: ``keys.not-hex`` or ``keys.too-short``.
    """
    try:
        content = bytes.fromhex(text.strip())
    except ValueError:
        # Without the cause: a traceback must not quote the text.
        raise VllmopsError(
            "keys.not-hex",
            f"{source} is not a key: it has {len(text.strip())} characters, and not all are hex",
            "create one with vllmops keygen",
        ) from None
    if len(content) < SECRET_BYTES:
        raise VllmopsError(
            "keys.too-short",
            f"{source} is too short for a key: {len(content)} bytes; {SECRET_BYTES} "
            f"({2 * SECRET_BYTES} hex characters) are required",
            "create one with vllmops keygen",
        )
    return Secret(content)


def format_kids(keys: Iterable[Key]) -> str:
    """Some keys, for a person."""
    return ", ".join(f"{key.kid} ({key.status})" for key in keys)
