"""Certificates of participants: what is in them, and how long they are valid. Read with what nvflare brings along."""

from __future__ import annotations

import datetime
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cryptography.x509 import Certificate as X509

__all__ = ["ENDS_SOON", "Certificate", "forget_ending", "handed_out", "signed_by"]

ENDS_SOON: Final = datetime.timedelta(days=60)
"""So long before their end certificates are made anew: kits have to travel to their sites."""
_SUBJECT: Final = {"CN": "2.5.4.3", "O": "2.5.4.10", "role": "1.2.840.113549.1.9.2"}


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a certificate says.

    Attributes:
        name: whose it is.
        org: their organisation.
        role: the role of a user; empty for others.
        begins: from when on it is valid.
        ends: until when.
    """

    name: str
    org: str
    role: str
    begins: datetime.datetime
    ends: datetime.datetime

    @classmethod
    def read(cls, path: Path) -> Certificate:
        """Reads a file.

        Raises:
            ValueError: there is no certificate in it.
            OSError: it cannot be read.
        """
        return cls.of(_load(path.read_bytes()))

    @classmethod
    def of(cls, found: X509) -> Certificate:
        """Reads one that is loaded."""
        words = {attribute.oid.dotted_string: str(attribute.value) for attribute in found.subject}
        name, org, role = (words.get(oid, "") for oid in _SUBJECT.values())
        return cls(name, org, role, found.not_valid_before_utc, found.not_valid_after_utc)

    def left(self) -> datetime.timedelta:
        """How long it is still valid; negative if it has ended."""
        return self.ends - datetime.datetime.now(datetime.UTC)


def _load(data: bytes) -> X509:
    from cryptography.x509 import load_pem_x509_certificate

    return load_pem_x509_certificate(data)


def signed_by(certificate: Path, authority: Path) -> bool:
    """Whether a certificate was signed by another one.

    Raises:
        ValueError: one of the files has no certificate in it.
        OSError: one of them cannot be read.
    """
    from cryptography.exceptions import InvalidSignature

    try:
        _load(certificate.read_bytes()).verify_directly_issued_by(_load(authority.read_bytes()))
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def handed_out(state: Path) -> dict[str, Certificate]:
    """The certificates that FLARE has made in a folder, by whose they are; all of them, also of those who left.

    Args:
        state: where FLARE keeps them; it need not be there.
    """
    return {name: Certificate.of(_load(found["cert"].encode())) for name, found in _subjects(state).items()}


def forget_ending(state: Path) -> None:
    """Has certificates made anew that end soon: FLARE hands out those that it finds, whether they are valid or not.

    Args:
        state: where FLARE keeps them; it need not be there.
    """
    ending = [name for name, found in handed_out(state).items() if found.left() < ENDS_SOON]
    if ending:
        kept = json.loads(state.read_text())
        new = state.with_name(f".{state.name}.{os.getpid()}")
        new.touch(mode=0o600)
        new.write_text(json.dumps({name: found for name, found in kept.items() if name not in ending}))
        new.replace(state)


def _subjects(state: Path) -> dict[str, Any]:
    try:
        kept: dict[str, Any] = json.loads(state.read_text())
    except FileNotFoundError:
        return {}
    return {name: found for name, found in kept.items() if isinstance(found, dict) and "cert" in found}
