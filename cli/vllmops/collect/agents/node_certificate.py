"""TLS between the nodes of a server: whoever has the admin token is one, and nobody else.

Key and certificate are derived from the token, so all nodes have the same ones: each end shows the
certificate and trusts it alone.
"""

from __future__ import annotations

import os
import ssl
from datetime import UTC, datetime
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

INFO = b"vllmops node 1 ed25519"
NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "vllmops node")])
# Always: the token is what ends, and a clock may be wrong.
FROM, UNTIL = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)


@lru_cache(maxsize=4)
def make_tls_context(token: str, *, server: bool) -> ssl.SSLContext:
    """What one end of a connection between two nodes needs.

    Args:
        token: the admin token.
        server: whether this end is asked.

    Raises:
        ssl.SSLError: this OpenSSL does not have what is needed.
    """
    key, certificate = derive_identity(token)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # the key says who it is
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=certificate.decode())
    # OpenSSL reads files alone: this one is in this process's memory.
    file = os.memfd_create("vllmops-node")
    try:
        os.write(file, key + certificate)
        made.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return made


def derive_identity(token: str) -> tuple[bytes, bytes]:
    """The private key and the certificate that all nodes with a token have, as PEM."""
    seed = HKDF(SHA256(), 32, salt=None, info=INFO).derive(token.encode())
    key = Ed25519PrivateKey.from_private_bytes(seed)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(NAME)
        .issuer_name(NAME)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(FROM)
        .not_valid_after(UNTIL)
        .sign(key, None)
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return secret, certificate.public_bytes(Encoding.PEM)
