"""Who sent a packet: links between the processes of a host job are authenticated and encrypted end to end.

FLARE authenticates the connections between machines. Those between the processes of one machine are open to all
programs there: the origin of a message is what its sender claims, and any of them can take over a route. So each link
begins with a handshake that both ends sign with the private keys of their startup kits, whose certificates the
federation's root certificate has issued. It agrees on keys for this link of this host job alone: one encrypts packets
(ChaCha20-Poly1305), the other one authenticates their acknowledgements. Both cover the number of the packet, which
detects repeated packets and is the nonce.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
from pathlib import Path
from typing import Final

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from dfm_async.errors import DfmError

TAG: Final = 16
"""The number of bytes that encryption adds to a packet."""
_HUB: Final = "server"
_LONGEST_CHAIN: Final = 8
_ROLE: Final = x509.NameOID.UNSTRUCTURED_NAME
"""Where FLARE puts the role of a user; certificates of sites have none, or what kind of participant they are for."""
_encode: Final = msgspec.msgpack.Encoder().encode


class Forged(ValueError):
    """A packet, or a handshake, does not come from the participant that it names."""


class _Signed(msgspec.Struct, frozen=True, array_like=True):
    """One side of a handshake.

    ``content``: the data of its sender. ``public``: the sender's key for this link. ``chain``: the certificate of
    the sender, and those up to the root certificate, which is left out. ``signature``: of all that, and of where it
    belongs.
    """

    content: bytes
    public: bytes
    chain: list[bytes]
    signature: bytes


_signed: Final = msgspec.msgpack.Decoder(_Signed)


class Keys:
    """The keys of one link, which carries packets in one direction and acknowledgements in the other.

    Args:
        messages: that of packets.
        answers: that of acknowledgements.
    """

    def __init__(self, messages: bytes, answers: bytes) -> None:
        self._messages = ChaCha20Poly1305(messages)
        self._answers = answers

    def encrypt(self, number: int, head: bytes, body: bytes) -> bytes:
        """Return the encrypted body of a packet; the head, which is sent in the clear, is authenticated.

        The number is the nonce: never encrypt two different packets with the same number.
        """
        return self._messages.encrypt(_nonce(number), body, head)

    def decrypt(self, number: int, head: bytes | memoryview, body: bytes | memoryview) -> bytes:
        """Return the body of a packet.

        Raises:
            Forged: the other end has not sent this packet.
        """
        try:
            return self._messages.decrypt(_nonce(number), body, head)
        except InvalidTag:
            raise Forged("a packet has a wrong authentication code") from None

    def acknowledgement(self, number: int) -> bytes:
        """Return what acknowledges the packet of a number: only the two ends of the link can make it."""
        return hmac.digest(self._answers, number.to_bytes(8, "big"), "sha256")


class Opening:
    """A handshake that was begun, at the side that begins it. Made by :meth:`Credentials.greet`.

    Attributes:
        greeting: what the other side is sent; each time the same.
    """

    def __init__(self, credentials: Credentials, peer: str, content: bytes) -> None:
        self._credentials = credentials
        self._peer = peer
        self._private = X25519PrivateKey.generate()
        self.greeting = credentials.sign("greeting", peer, b"", content, self._private)

    def finish(self, answer: bytes | memoryview) -> tuple[Keys, bytes]:
        """Take the answer of the other side; return the keys, and the content of the answer.

        Raises:
            Forged: it is not an answer of the other side to this greeting.
        """
        found = self._credentials.verify("answer", self._peer, hashlib.sha256(self.greeting).digest(), answer)
        return _agree(self._private, found.public, self.greeting, bytes(answer)), found.content


class Credentials:
    """What a participant signs handshakes with, and knows the others by.

    Args:
        name: its name in the host job; that of the hub is ``server``.
        host_job: the FLARE job.
        key: its private key.
        chain: its certificate, and those that lead to the root certificate.
        root: the root certificate of the federation.
        server: the name in the server's certificate.
    """

    def __init__(
        self,
        name: str,
        host_job: str,
        key: RSAPrivateKey,
        chain: list[x509.Certificate],
        root: x509.Certificate,
        server: str,
    ) -> None:
        self.name = name
        self._host_job = host_job
        self._key = key
        self._chain = [certificate.public_bytes(Encoding.DER) for certificate in chain]
        self._root = root
        self._server = server
        self._known: dict[tuple[str, bytes], RSAPublicKey] = {}

    @classmethod
    def load(cls, startup: Path, name: str, host_job: str) -> Credentials:
        """Read the startup kit of a client, or of the server.

        Raises:
            DfmError: its certificate, its private key or the root certificate is missing or cannot be read.
        """
        kind = "server" if name == _HUB else "client"
        try:
            chain = x509.load_pem_x509_certificates((startup / f"{kind}.crt").read_bytes())
            root = x509.load_pem_x509_certificate((startup / "rootCA.pem").read_bytes())
            key = load_pem_private_key((startup / f"{kind}.key").read_bytes(), None)
            if name == _HUB:
                server = _common_name(chain[0])
            else:
                found = json.loads((startup / "fed_client.json").read_text())["servers"][0]
                server = str(found.get("auth_identity") or found["identity"])
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            text = f"{str(startup)!r} is not a complete startup kit: {type(error).__name__}: {error}"
            raise DfmError(f"{text}. Provision it again") from error
        if not isinstance(key, RSAPrivateKey):
            raise DfmError(f"the private key in {str(startup)!r} is not an RSA key. Provision it again")
        return cls(name, host_job, key, chain, root, server)

    def greet(self, peer: str, content: bytes) -> Opening:
        """Begin a handshake with a peer; the greeting carries content."""
        return Opening(self, peer, content)

    def read_greeting(self, peer: str, greeting: bytes | memoryview) -> bytes:
        """Return the content of a peer's greeting.

        Raises:
            Forged: it is not a greeting of this peer for us.
        """
        return self.verify("greeting", peer, b"", greeting).content

    def answer(self, peer: str, greeting: bytes | memoryview, content: bytes) -> tuple[Keys, bytes]:
        """Answer a greeting, with content; return the keys, and the answer.

        Raises:
            Forged: it is not a greeting of this peer for us.
        """
        found, private = self.verify("greeting", peer, b"", greeting), X25519PrivateKey.generate()
        answer = self.sign("answer", peer, hashlib.sha256(greeting).digest(), content, private)
        return _agree(private, found.public, bytes(greeting), answer), answer

    def sign(self, kind: str, peer: str, before: bytes, content: bytes, private: X25519PrivateKey) -> bytes:
        """Return one side of a handshake; ``before``: the digest of what it answers."""
        public = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        data = self._to_sign(kind, self.name, peer, before, content, public)
        return _encode(_Signed(content, public, self._chain, self._key.sign(data, PKCS1v15(), hashes.SHA256())))

    def verify(self, kind: str, peer: str, before: bytes, data: bytes | memoryview) -> _Signed:
        """Read what :meth:`sign` of a peer has returned.

        Raises:
            Forged: it does not come from this peer, or belongs elsewhere.
        """
        try:
            found = _signed.decode(data)
        except ValueError as error:
            raise Forged(f"a handshake in the name of {peer} is not signed by it: {error}") from error
        key = self._key_of(peer, found.chain)
        signed = self._to_sign(kind, peer, self.name, before, found.content, found.public)
        try:
            key.verify(found.signature, signed, PKCS1v15(), hashes.SHA256())
        except InvalidSignature as error:
            raise Forged(f"a handshake in the name of {peer} is not signed by it") from error
        return found

    def _to_sign(self, kind: str, sender: str, receiver: str, before: bytes, content: bytes, public: bytes) -> bytes:
        return _encode(["dfm_async link 2", kind, self._host_job, sender, receiver, before, content, public])

    def _key_of(self, peer: str, chain: list[bytes]) -> RSAPublicKey:
        """Return the public key of a peer, from its certificates."""
        digest = hashlib.sha256(b"".join(chain)).digest()
        key = self._known.get((peer, digest))
        if key is None:
            key = self._verified(peer, chain)
            if len(self._known) < 10_000:
                self._known[peer, digest] = key
        return key

    def _verified(self, peer: str, chain: list[bytes]) -> RSAPublicKey:
        if not 0 < len(chain) <= _LONGEST_CHAIN:
            raise Forged(f"a handshake in the name of {peer} has {len(chain)} certificates")
        now = datetime.datetime.now(datetime.UTC)
        try:
            certificates = [x509.load_der_x509_certificate(data) for data in chain]
            issuers = [*certificates[1:], self._root]
            for certificate, issuer in zip(certificates, issuers, strict=True):
                certificate.verify_directly_issued_by(issuer)
                if issuer is not self._root and not _may_issue(issuer):
                    raise Forged(f"a certificate of {peer} was issued by one that may not issue any")
                if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
                    raise Forged(f"a certificate of {peer} is not valid at present")
            name, key = _common_name(certificates[0]), certificates[0].public_key()
            roles = {str(role.value) for role in certificates[0].subject.get_attributes_for_oid(_ROLE)}
        except (InvalidSignature, ValueError, TypeError) as error:
            if isinstance(error, Forged):
                raise
            text = f"a certificate in the name of {peer} was not issued by this federation"
            raise Forged(f"{text}: {error or type(error).__name__}") from error
        if name != (self._server if peer == _HUB else peer):
            raise Forged(f"a handshake in the name of {peer} has the certificate of {name}")
        if roles - {"server" if peer == _HUB else "client"}:
            raise Forged(f"the certificate of {peer} is for another role: {', '.join(sorted(roles))}")
        if not isinstance(key, RSAPublicKey):
            raise Forged(f"the certificate of {peer} does not have an RSA key")
        return key


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


def _common_name(certificate: x509.Certificate) -> str:
    (found,) = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return str(found.value)


def _may_issue(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _agree(private: X25519PrivateKey, public: bytes, greeting: bytes, answer: bytes) -> Keys:
    """Return the keys that both sides get from their handshake."""
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise Forged(f"a handshake has an impossible key: {error}") from error
    salt = hashlib.sha256(hashlib.sha256(greeting).digest() + answer).digest()
    found = HKDF(hashes.SHA256(), 64, salt, b"dfm_async link keys 2").derive(shared)
    return Keys(found[:32], found[32:])
