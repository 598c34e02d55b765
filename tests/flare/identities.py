"""Participants of a federation that exists only in a test: their private keys and certificates."""

from __future__ import annotations

import datetime
import functools

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa

from dfm_async.targets.flare.authentication import Credentials

__all__ = ["SERVER", "certificate", "credentials", "key"]

SERVER = "server.test"
"""The name in the server's certificate."""


@functools.cache
def key(name: str) -> rsa.RSAPrivateKey:
    """The private key of a participant, or of an authority."""
    return rsa.generate_private_key(65537, 2048)


@functools.cache
def certificate(
    name: str, issuer: str = "root", *, authority: bool = False, owner: str = "", days: int = 30, role: str = ""
) -> x509.Certificate:
    """A certificate with a name in it; ``owner``: whose key it has, if not that of the name."""
    now = datetime.datetime.now(datetime.UTC)
    subject = [x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]
    if role:
        subject.append(x509.NameAttribute(x509.NameOID.UNSTRUCTURED_NAME, role))
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name(subject))
        .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
        .public_key(key(owner or name).public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=60))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )
    return builder.sign(key(issuer), hashes.SHA256())


def credentials(
    name: str, host_job: str = "job", *, owner: str = "", chain: list[x509.Certificate] | None = None
) -> Credentials:
    """What a participant signs with; ``owner``: who pretends to be this participant, if somebody does."""
    holder = owner or (SERVER if name == "server" else name)
    root = certificate("root", authority=True)
    return Credentials(name, host_job, key(holder), chain or [certificate(holder)], root, SERVER)
