"""Certificates of participants: their content and validity. Read with a dependency of nvflare."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dfm_async.base.files import replaced

if TYPE_CHECKING:
    from cryptography.x509 import Certificate as X509

ENDS_SOON: Final = datetime.timedelta(days=60)
"""The time before their expiry at which certificates are renewed: kits have to travel to their sites."""
_SUBJECT: Final = {"CN": "2.5.4.3", "O": "2.5.4.10", "role": "1.2.840.113549.1.9.2"}


@dataclass(frozen=True, slots=True)
class Certificate:
    """The content of a certificate: the participant, the organisation, the role of a user, the end of its validity."""

    name: str
    org: str
    role: str
    ends: datetime.datetime

    @classmethod
    def read(cls, path: Path) -> Certificate:
        """Read a file. Raises ``ValueError`` if it has no certificate."""
        return cls.of(_load(path.read_bytes()))

    @classmethod
    def of(cls, found: X509) -> Certificate:
        """Return the content of a loaded certificate."""
        words = {attribute.oid.dotted_string: str(attribute.value) for attribute in found.subject}
        name, org, role = (words.get(oid, "") for oid in _SUBJECT.values())
        return cls(name, org, role, found.not_valid_after_utc)

    def left(self) -> datetime.timedelta:
        """Return the time until it expires; negative if it has expired."""
        return self.ends - datetime.datetime.now(datetime.UTC)


def _load(data: bytes) -> X509:
    from cryptography.x509 import load_pem_x509_certificate

    return load_pem_x509_certificate(data)


def signed_by(certificate: Path, authority: Path) -> bool:
    """Return whether a certificate was signed by another one."""
    from cryptography.exceptions import InvalidSignature

    try:
        _load(certificate.read_bytes()).verify_directly_issued_by(_load(authority.read_bytes()))
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def handed_out(state: Path) -> dict[str, Certificate]:
    """Return the certificates in the file of FLARE, by participant, with former ones; none if there is no file."""
    return {
        name: Certificate.of(_load(found["cert"].encode()))
        for name, found in _kept(state).items()
        if isinstance(found, dict) and "cert" in found
    }


def forget_ending(state: Path) -> None:
    """Remove certificates that expire soon from the file of FLARE, so that it renews them: it reuses what it finds."""
    ending = [name for name, found in handed_out(state).items() if found.left() < ENDS_SOON]
    if ending:
        kept = {name: found for name, found in _kept(state).items() if name not in ending}
        write_private(state, json.dumps(kept))


def _kept(state: Path) -> dict[str, Any]:
    return dict(json.loads(state.read_text())) if state.exists() else {}


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically, readable only for its owner."""
    with replaced(path, 0o600) as file:
        file.write(text.encode())
