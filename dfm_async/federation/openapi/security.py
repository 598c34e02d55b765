"""How a service wants to know who asks: from the document, and from what the caller has secrets for."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from dfm_async.federation.files.values import Value, one_of
from dfm_async.federation.openapi.arguments import text_of
from dfm_async.federation.openapi.names import identifier, unused
from dfm_async.federation.openapi.schemas import Schemas
from dfm_async.model.http import Credential

__all__ = ["Secret", "Security"]

_TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


class Secret(NamedTuple):
    """How a secret is sent, and its key in the vault."""

    credential: Credential
    key: str


class Security:
    """The ways in which a service wants to know who asks.

    Args:
        document: the document.
        schemas: follows references.
        auth: the key in the vault for each scheme of the document that there is a secret for.
    """

    def __init__(self, document: Value, schemas: Schemas, auth: Mapping[str, str]) -> None:
        self._auth = auth
        self._schemes: dict[str, Value] = {}
        self._general = document.get("security")
        components = document.get("components")
        listed = None if components is None else components.get("securitySchemes")
        for name, part in () if listed is None else listed.mapping("securitySchemes"):
            found = schemas.follow(part)
            if found is not None:
                self._schemes[name] = found
        for name in auth:
            if name not in self._schemes:
                known = one_of(name, list(self._schemes))
                document.problem(f"auth names the security scheme {name!r}, which the document does not have; {known}")

    def of(self, operation: Value, used: Collection[str]) -> list[Secret]:
        """The secrets that requests of an operation need; their arguments have none of the names that are used."""
        stated = operation.get("security") or self._general
        if stated is None or not stated.node.value:
            return []
        ways = [[name for name, _ in way.mapping("a way")] for way in stated.items("security")]
        for way in ways:
            if way and all(name in self._auth for name in way):
                return [secret for name in way if (secret := self._secret(stated, name, used)) is not None]
        if [] in ways:
            return []
        shown = " or ".join(" and ".join(map(repr, way)) for way in ways)
        operation.problem(
            f"the service wants to know who asks, by {shown}: name the keys of your vault for it, such as "
            f"auth={{{ways[0][0]!r}: 'KEY'}}"
        )
        return []

    def _secret(self, stated: Value, name: str, used: Collection[str]) -> Secret | None:
        scheme = self._schemes.get(name)
        if scheme is None:
            stated.problem(f"there is no security scheme {name!r}; {one_of(name, list(self._schemes))}")
            return None
        credential = self._credential(scheme, unused(f"auth_{identifier(name)}", used))
        return None if credential is None else Secret(credential, self._auth[name])

    def _credential(self, scheme: Value, argument: str) -> Credential | None:
        kind, http = text_of(scheme, "type"), text_of(scheme, "scheme").lower()
        match kind, http:
            case ("http", "bearer" | "basic"):
                return Credential(argument=argument, kind="basic" if http == "basic" else "bearer")
            case ("oauth2" | "openIdConnect", _):  # the vault has an access token
                return Credential(argument=argument, kind="bearer")
            case ("apiKey", _):
                return self._api_key(scheme, argument)
        scheme.problem(
            f"this kind of security is not supported: {kind or 'none'} {http}".rstrip() + ". Supported are http with "
            "bearer or basic, apiKey, oauth2 and openIdConnect"
        )
        return None

    def _api_key(self, scheme: Value, argument: str) -> Credential | None:
        name, place = text_of(scheme, "name"), text_of(scheme, "in")
        if not name or (place != "query" and not _TOKEN.fullmatch(name)):
            scheme.problem("an apiKey must have the name of a header, a cookie or a part of the query")
            return None
        match place:
            case "header" | "query" | "cookie":
                return Credential(argument=argument, kind=place, name=name)
        scheme.problem(f"an apiKey is in a header, the query or a cookie, not in {place!r}")
        return None
