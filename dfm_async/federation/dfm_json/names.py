"""The names of classes in DFM's JSON: a table that is made of the federation, and a fixed list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dfm_async.federation.federation import Federation
    from dfm_async.federation.operation import Operation

__all__ = ["CORE", "FOR_EACH", "IF", "TRY_FROM_CACHE", "WRITE_TO_CACHE", "YIELD", "Called", "ClassNames"]

CORE: Final = "nv_dfm_core.api."
_OLD_CORE: Final = "dfm.api."

YIELD: Final = "Yield"
FOR_EACH: Final = "ForEach"
IF: Final = "If"
TRY_FROM_CACHE: Final = "TryFromCache"
WRITE_TO_CACHE: Final = "_WriteToCache"
_STATEMENTS: Final = frozenset({YIELD, FOR_EACH, IF, TRY_FROM_CACHE, WRITE_TO_CACHE})


@dataclass(frozen=True, slots=True)
class Called:
    """What a class name of an operation stands for."""

    operation: Operation[..., Any]
    site: str | None = None
    """The site that the class is fixed to."""
    provider: str | None = None
    """The provider that the class is fixed to."""


class ClassNames:
    """The classes that pipelines of a federation may name.

    Args:
        federation: whose operations they are.
    """

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self.package = federation.name
        """What class names of the federation begin with."""
        self._called: dict[str, Called] = {}
        for site in federation.sites.values():
            for name, provider in sorted(site.adapters, key=lambda key: key[1] is not None):
                operation = federation.operations[name]
                self._called.setdefault(self.at_site(name, site.name, provider), Called(operation, site.name, provider))
        for name, operation in federation.operations.items():
            self._called[self.anywhere(name)] = Called(operation)

    def anywhere(self, operation: str) -> str:
        """The class of an operation that any site may run."""
        return f"{self.package}.fed.api.{operation}"

    def at_site(self, operation: str, site: str, provider: str | None) -> str:
        """The class of an operation as one site offers it, with the parameters that the site adds."""
        inner = "" if provider is None else f"{provider}."
        return f"{self.package}.fed.site.{site}.{inner}{operation}"

    def statement(self, class_name: str) -> str | None:
        """Which statement of the language a class is, if it is one."""
        for prefix in (CORE, _OLD_CORE):
            found = class_name.removeprefix(prefix)
            if found != class_name and found in _STATEMENTS:
                return found
        return None

    def called(self, class_name: str) -> Called | None:
        """Which operation a class is, if it is one of the federation."""
        return self._called.get(class_name)

    def unknown(self, class_name: str) -> str:
        """Says what is wrong with the name of a class that is not there."""
        package, separator, rest = class_name.partition(".fed.")
        name = self._federation.name
        if not separator:
            return f"{class_name!r} is neither a statement of the language nor an operation of federation {name!r}"
        if package != self.package:
            return f"{class_name!r} belongs to package {package!r}, but federation {name!r} to {self.package!r}"
        kind, _, rest = rest.partition(".")
        if kind == "api":
            return f"federation {name!r} has no operation {rest!r} (it has: {_listed(self._federation.operations)})"
        site, _, rest = rest.partition(".")
        found = self._federation.sites.get(site)
        if kind != "site" or found is None:
            return f"{class_name!r} names no site of federation {name!r} (it has: {_listed(self._federation.sites)})"
        return f"site {site!r} offers no {rest!r} (it offers: {_listed(n for n, _ in found.adapters)})"


def _listed(names: Any) -> str:
    found = list(dict.fromkeys(names))
    return ", ".join(found[:20]) + (", ..." if len(found) > 20 else "") or "none"
