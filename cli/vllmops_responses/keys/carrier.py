"""The carrier: a conversation that the client keeps, sealed, in a field ``encrypted_content``.

`seal_history` makes one, `unseal_carrier` takes one back; both need a `KeyRing`, no store and no
vLLM. They take some 20 ms for 1 MB, of which zlib takes most without the GIL: `LARGE` ones belong
beside the event loop.

**Format 2**, which is written unless another is asked for::

    carrier    = "vllm:2:" kid ":" suite ":" body
    kid        = 1 to 64 characters out of A-Z a-z 0-9 . _ -
    suite      = "a256gcm-zlib", so far the only one
    body       = base64url, without padding, of: salt (16 bytes), ciphertext, tag (16 bytes)

    key, nonce = the first 32 and the last 12 bytes of
                 HKDF-SHA-256(secret, salt, info = "vllmops carrier 2 a256gcm-zlib", 44 bytes)
    ciphertext, tag = AES-256-GCM(key, nonce, plaintext, additional data = ASCII of the carrier
                 from its begin to the colon before the body, that colon included)
    plaintext  = zlib stream (RFC 1950) of a JSON object in UTF-8, with at least
                 "iat", "exp"  when it was sealed and from when on it is refused: whole seconds
                               since the epoch
                 "model"       what serves the conversation
                 "owner"       whose it is: the SHA-256 of the API key as 64 lower-case hex
                               characters, "" where the server asks for no key
                 "history"     array: the items of the conversation, the oldest first, as in the
                               input and the output of the Responses API; no instructions

``secret`` is the key's 32 or more bytes, ``salt`` is random for each carrier, HKDF is RFC 5869. A
body is refused unless its base64url is the one that encoding its bytes gives. The kid tells which
key of the ring; it and the suite are under the tag as all the rest is.

**What the length tells.** The cipher hides what a carrier says, and not how long it is. Text that
repeats earlier text compresses better: whoever writes a part of a conversation and sees lengths
could guess the rest of it, a character at a time. The writer does three things against that. Each
is a part of the zlib stream that any reader of RFC 1950 skips:

- *Objects are kept apart.* Each object in a list, so each item and each part of a message, is
  compressed by itself (a full flush before it). What somebody writes in one object has no effect
  on the length of another one, in however many tries.
- *Noise.* Empty blocks, of a length that is drawn anew for each carrier: 256 bytes on average,
  triangular from 0 to 512, so that it has no sharp edge. It is for the inside of one object,
  where an application puts a secret and a user's question into one text. There a right guess saves
  about one byte. To tell one guess from another takes some 200,000 turns each (three standard
  deviations); where n bytes are saved at once, 200,000 / n^2.
- *Buckets.* Empty blocks up to the next of few lengths: a body has a multiple of 384 bytes up to
  12 KiB, then one of 16 lengths for each doubling. One carrier tells less than 7 bits up to
  100 KB, and less than 8 bits at all; they say about how long the conversation is.

Before, an attack got 9 of 9 characters of a developer message out of 324 carriers. Now it gets none
beyond chance out of 10,000 (tests/responses/keys/test_length.py). After 1, 10 and 100 turns of
2.2 KB a carrier has 3, 20 and 180 KB where it had 2, 11 and 89: text of one item no longer saves
any in another. To seal and to open 100 turns takes 15 ms instead of 7.

**Format 1** is signed and not encrypted: anybody can read it. It is always read::

    carrier    = "vllm:1:" payload ":" signature
    payload    = base64 (RFC 4648, section 4) of JSON: an array, the history, as messages of the
                 Chat Completions API; for gpt-oss #35903 has Harmony's, which are read, too
    signature  = HMAC-SHA-256(secret, ASCII of the payload), 64 lower-case hex characters

It names no key, so each one is tried; it tells no time, no model and no owner, so none is checked.

What does not begin with ``vllm:`` is somebody else's, OpenAI's say: `is_vllm_carrier` tells.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
import secrets
import time
import zlib
from enum import StrEnum
from typing import Any

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from vllmops.support.durations import validate_seconds
from vllmops.support.error_codes import ErrorCode
from vllmops.support.errors import VllmopsError

from .keyring import CARRIER_TTL_S, KID, Key, KeyRing, KeyStatus

OURS = "vllm:"
SUITE = "a256gcm-zlib"
SALT_BYTES, KEY_BYTES, NONCE_BYTES, TAG_BYTES = 16, 32, 12, 16
# Text shrinks to a quarter or a third; higher levels win a tenth more and take three times as long.
LEVEL = 1
NOISE_BYTES = 256
LEAST_BUCKET, BUCKETS = 384, 16  # bytes; for each doubling
# Blocks of deflate (RFC 1951) that hold nothing, from a byte's boundary to the next: a stored one,
# and one with fixed codes before a stored one.
EMPTY_5, EMPTY_6 = b"\0\0\0\xff\xff", b"\2\0\0\0\xff\xff"
LEAST_PADDING = 4 * len(EMPTY_6)
APART = b'},{"'  # from one object to the next in a list; within a text the " would be escaped
MOST_BYTES = 32 << 20  # of a history, as JSON; images and audio are in it as base64
DEEPEST = 100  # arrays and objects within each other
NESTING = frozenset({dict, list, tuple})
LARGE = 1 << 16
CONTENT = {"iat": int, "exp": int, "model": str, "owner": str, "history": list}
FORMAT_1 = re.compile(r"vllm:1:([A-Za-z0-9+/]*={0,2}):([0-9a-f]{64})")
FORMAT_2 = re.compile(rf"(vllm:2:({KID.pattern}):([a-z0-9-]{{1,32}}):)([A-Za-z0-9_-]*)")


class CarrierProblem(StrEnum):
    """What can be wrong with a carrier."""

    FOREIGN = "foreign"
    MALFORMED = "malformed"
    TAMPERED = "tampered"
    UNKNOWN_KEY = "unknown-key"
    REVOKED_KEY = "revoked-key"
    EXPIRED = "expired"
    OTHER_MODEL = "other-model"
    OTHER_OWNER = "other-owner"
    TOO_LARGE = "too-large"


CODES: dict[CarrierProblem, ErrorCode] = {
    CarrierProblem.FOREIGN: "carrier.foreign",
    CarrierProblem.MALFORMED: "carrier.malformed",
    CarrierProblem.TAMPERED: "carrier.tampered",
    CarrierProblem.UNKNOWN_KEY: "carrier.unknown-key",
    CarrierProblem.REVOKED_KEY: "carrier.revoked-key",
    CarrierProblem.EXPIRED: "carrier.expired",
    CarrierProblem.OTHER_MODEL: "carrier.other-model",
    CarrierProblem.OTHER_OWNER: "carrier.other-owner",
    CarrierProblem.TOO_LARGE: "carrier.too-large",
}


class CarrierError(VllmopsError):
    """A carrier that is refused; the message is safe for the client and has no secret.

    Args:
        case: what is wrong; the code is ``carrier.`` and this.
        message: in words.
        carrier: its content, if it is genuine and was refused for another reason.
    """

    def __init__(self, case: CarrierProblem, message: str, carrier: Carrier | None = None) -> None:
        super().__init__(CODES[case], message, "start a new conversation, without the carrier")
        self.case = case
        self.carrier = carrier


class Carrier(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a genuine carrier. Fields that format 1 does not have are None.

    Args:
        format: 1 or 2.
        kid: the key that sealed it.
        issued_at: seconds since the epoch.
        expires_at: seconds since the epoch.
        model: what it was made for.
        owner: whose it is.
        history: the items of the conversation; of format 1 messages.
    """

    format: int
    kid: str
    issued_at: int | None = None
    expires_at: int | None = None
    model: str | None = None
    owner: str | None = None
    history: list[Any]


def is_vllm_carrier(text: str) -> bool:
    """Whether an ``encrypted_content`` has the form of a vLLM carrier, valid or not."""
    return text.startswith(OURS)


def seal_history(
    history: list[Any],
    keyring: KeyRing,
    *,
    model: str,
    owner: str,
    ttl_s: float = CARRIER_TTL_S,
    now: float | None = None,
) -> str:
    """A carrier of format 2.

    Args:
        history: the items of the conversation: what JSON can hold.
        keyring: whose primary seals it.
        model: what has to be served where it comes back.
        owner: whose key has to be presented with it, as a hash; ``""`` without keys.
        ttl_s: seconds from now on for which it is taken back.
        now: seconds since the epoch; the present.

    Raises:
        VllmopsError: ``keys.no-primary``, or ``usage`` if `ttl_s` is no number of seconds.
        CarrierError: ``too-large``, or ``malformed`` if JSON can't hold the history.
    """
    key = keyring.require_primary()
    now = time.time() if now is None else now
    validate_seconds("the lifetime of carriers", ttl_s)
    content = {
        "iat": int(now),
        "exp": int(now + ttl_s),
        "model": model,
        "owner": owner,
        "history": history,
    }
    head = f"{OURS}2:{key.kid}:{SUITE}:"
    salt = secrets.token_bytes(SALT_BYTES)
    cipher, nonce = derive_cipher(key, salt)
    sealed = cipher.encrypt(nonce, compress_and_pad(encode_json(content)), head.encode())
    text = head + base64.urlsafe_b64encode(salt + sealed).rstrip(b"=").decode()
    if (
        len(text) > compute_longest_carrier()
    ):  # millions of tiny objects, which keeping them apart doubles
        raise make_too_large_error()
    return text


def sign_history(history: list[Any], keyring: KeyRing) -> str:
    """A carrier of format 1, its history as messages; arguments and errors as of `seal_history`."""
    payload = base64.b64encode(encode_json(history))
    return f"{OURS}1:{payload.decode()}:{compute_signature(keyring.require_primary(), payload)}"


def measure_history(history: list[Any]) -> int:
    """Check that a carrier can hold a history; returns its bytes as JSON.

    Raises:
        CarrierError: ``too-large``, or ``malformed`` if JSON can't hold it.
    """
    return len(encode_json(history))


def unseal_carrier(
    text: str, keyring: KeyRing, *, model: str, owner: str, now: float | None = None
) -> Carrier:
    """The content of a carrier that is valid here.

    Args:
        text: the carrier.
        keyring: the keys.
        model: what is served here.
        owner: who presents it, as in `seal_history`.
        now: seconds since the epoch; the present.

    Raises:
        CarrierError: whatever is wrong with it.
    """
    carrier = verify_carrier(text, keyring)
    now = time.time() if now is None else now
    if why := find_refusal(carrier, keyring.get(carrier.kid), now, model, owner):
        raise CarrierError(*why, carrier)
    return carrier


def verify_carrier(text: str, keyring: KeyRing) -> Carrier:
    """The content of a carrier that a key of the ring has sealed, also a revoked or expired one.

    Raises:
        CarrierError: ``foreign``, ``malformed``, ``tampered``, ``unknown-key`` or ``too-large``.
    """
    if not is_vllm_carrier(text):
        raise CarrierError(CarrierProblem.FOREIGN, "this is not a vLLM carrier")
    if len(text) > compute_longest_carrier():
        raise make_too_large_error()
    if match := FORMAT_2.fullmatch(text):
        return decrypt_format_2(keyring, *match.groups())
    if match := FORMAT_1.fullmatch(text):
        return verify_format_1(keyring, *match.groups())
    if re.match(r"vllm:[12]:", text):
        raise make_malformed_error("it is incomplete or contains invalid characters")
    raise make_malformed_error("its format is unknown: a newer version may have made it")


def decrypt_format_2(keyring: KeyRing, head: str, kid: str, suite: str, body: str) -> Carrier:
    if suite != SUITE:
        raise make_malformed_error("its cipher is unknown: a newer version may have made it")
    sealed = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)) if len(body) % 4 != 1 else b""
    if len(sealed) < SALT_BYTES + TAG_BYTES:
        raise make_malformed_error("it is cut off")
    # Where the last group is not full, its last character has bits that encode nothing.
    last = base64.urlsafe_b64encode(sealed[len(sealed) // 3 * 3 :]).rstrip(b"=").decode()
    if not body.endswith(last):
        raise make_tampered_error("it was modified")
    key = keyring.find(kid)
    if key is None:
        raise CarrierError(CarrierProblem.UNKNOWN_KEY, "the key that sealed it is unknown")
    cipher, nonce = derive_cipher(key, sealed[:SALT_BYTES])
    try:
        content = decode_json(
            decompress_content(cipher.decrypt(nonce, sealed[SALT_BYTES:], head.encode()))
        )
    except InvalidTag:
        raise make_tampered_error("it was modified") from None
    if not isinstance(content, dict) or any(
        type(content.get(name)) is not kind for name, kind in CONTENT.items()
    ):
        raise make_malformed_error("its content is not a conversation")
    return Carrier(
        format=2,
        kid=kid,
        issued_at=content["iat"],
        expires_at=content["exp"],
        model=content["model"],
        owner=content["owner"],
        history=content["history"],
    )


def verify_format_1(keyring: KeyRing, payload: str, signature: str) -> Carrier:
    for key in keyring.keys:
        if hmac.compare_digest(compute_signature(key, payload.encode()), signature):
            break
    else:
        raise make_tampered_error("it was modified, or signed by an unknown key")
    try:
        history = decode_json(base64.b64decode(payload, validate=True))
    except binascii.Error:
        raise make_malformed_error("its base64 is damaged") from None
    if not isinstance(history, list):
        raise make_malformed_error("its content is not a conversation")
    return Carrier(format=1, kid=key.kid, history=history)


def find_refusal(
    carrier: Carrier, key: Key, now: float, model: str | None = None, owner: str | None = None
) -> tuple[CarrierProblem, str] | None:
    """Why a genuine carrier is refused, None if it is accepted.

    Args:
        carrier: what it says.
        key: that sealed it.
        now: seconds since the epoch.
        model: what is served here, None for any.
        owner: who presents it, None for anybody.
    """
    if key.status is KeyStatus.REVOKED:
        return CarrierProblem.REVOKED_KEY, "the key that sealed it was revoked"
    if key.is_expired(now):
        return CarrierProblem.EXPIRED, "the key that sealed it has expired"
    if carrier.expires_at is not None and now >= carrier.expires_at:
        return CarrierProblem.EXPIRED, "it has expired"
    if None not in (model, carrier.model) and model != carrier.model:
        return CarrierProblem.OTHER_MODEL, "it was made for another model"
    if (
        owner is not None
        and carrier.owner is not None
        and not is_equal_constant_time(owner, carrier.owner)
    ):
        return CarrierProblem.OTHER_OWNER, "it belongs to another API key"
    return None


def is_equal_constant_time(first_text: str, second_text: str) -> bool:
    """Whether two texts are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(
        first_text.encode(errors="surrogatepass"), second_text.encode(errors="surrogatepass")
    )


def derive_cipher(key: Key, salt: bytes) -> tuple[AESGCM, bytes]:
    """The cipher and the nonce of one carrier."""
    info = f"vllmops carrier 2 {SUITE}".encode()
    hkdf = HKDF(algorithm=SHA256(), length=KEY_BYTES + NONCE_BYTES, salt=salt, info=info)
    made = hkdf.derive(key.secret.reveal())
    return AESGCM(made[:KEY_BYTES]), made[KEY_BYTES:]


def compute_signature(key: Key, payload: bytes) -> str:
    return hmac.new(key.secret.reveal(), payload, hashlib.sha256).hexdigest()


def encode_json(content: Any) -> bytes:
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        try:
            made = text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can only hold escaped
            made = json.dumps(content, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError):
        raise make_malformed_error("the conversation cannot be encoded as JSON") from None
    if len(made) > MOST_BYTES:
        raise make_too_large_error()
    validate_depth(made, content)
    return made


def decode_json(text: bytes) -> Any:
    if len(text) > MOST_BYTES:
        raise make_too_large_error()
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise make_malformed_error("its content is not JSON") from None
    validate_depth(text, content)
    return content


def validate_depth(text: bytes, content: Any) -> None:
    """Refuse what is nested so deeply that whoever walks through it may fail.

    Args:
        text: the JSON, which tells most of the time that it need not be walked through.
        content: what it says.
    """
    if text.count(b"[") + text.count(b"{") <= DEEPEST:
        return
    level: list[Any] = [[content]]
    for _ in range(DEEPEST + 1):
        level = [
            part
            for value in level
            for part in (value.values() if value.__class__ is dict else value)
            if part.__class__ in NESTING
        ]
        if not level:
            return
    raise make_malformed_error(f"it is nested more than {DEEPEST} deep")


def compress_and_pad(content: bytes) -> bytes:
    """A zlib stream whose length reveals little of its content.

    Args:
        content: JSON without blanks.
    """
    stream = zlib.compressobj(LEVEL)
    first, *others = content.split(APART)
    made = [stream.compress(first), stream.flush(zlib.Z_FULL_FLUSH)]
    for text in others:
        made += stream.compress(APART + text), stream.flush(zlib.Z_FULL_FLUSH)
    end = stream.flush()
    length = SALT_BYTES + sum(map(len, made)) + len(end) + TAG_BYTES
    noise = secrets.randbelow(NOISE_BYTES) + secrets.randbelow(NOISE_BYTES)
    padding = round_to_bucket(length + LEAST_PADDING + noise) - length
    made += EMPTY_6 * (padding % 5), EMPTY_5 * ((padding - 6 * (padding % 5)) // 5)
    return b"".join((*made, end))


def compute_longest_carrier() -> int:
    """Characters of a carrier: base64 makes it longer by a third, padding by a sixteenth."""
    return MOST_BYTES + MOST_BYTES // 2


def round_to_bucket(length: int) -> int:
    """The next of few lengths that is not shorter; a long one grows by a sixteenth at most."""
    triples = -(-length // 3)  # of bytes: base64 makes a whole number of characters of them
    step = max(LEAST_BUCKET // 3, (1 << triples.bit_length()) // (2 * BUCKETS))
    return -(-triples // step) * step * 3


def decompress_content(stream: bytes) -> bytes:
    """The content of a zlib stream, up to the limit."""
    inflate = zlib.decompressobj()
    try:
        content = inflate.decompress(stream, MOST_BYTES + 1)
    except zlib.error:
        raise make_malformed_error("its content cannot be decompressed") from None
    if len(content) > MOST_BYTES:
        raise make_too_large_error()
    if not inflate.eof or inflate.unused_data:
        raise make_malformed_error("its content cannot be decompressed")
    return content


def make_malformed_error(reason: str) -> CarrierError:
    return CarrierError(CarrierProblem.MALFORMED, f"the carrier cannot be read: {reason}")


def make_tampered_error(reason: str) -> CarrierError:
    return CarrierError(CarrierProblem.TAMPERED, f"the carrier is not genuine: {reason}")


def make_too_large_error() -> CarrierError:
    most = MOST_BYTES >> 20
    return CarrierError(
        CarrierProblem.TOO_LARGE,
        f"the conversation is larger than a carrier may hold: {most} MiB as JSON",
    )
