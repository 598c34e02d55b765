"""What ``dfm-async doctor`` finds out about installed packages: those that are needed, and the extras."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dfm_async.base.installation import install_hint
from dfm_async.model.findings import Finding

__all__ = ["package_findings"]

_NAME: Final = "dfm-async"


def package_findings() -> Iterator[Finding]:
    """Tells which packages are there, and whether their versions fit."""
    try:
        ours = metadata.distribution(_NAME)
    except metadata.PackageNotFoundError:
        yield Finding("packages", "bad", f"{_NAME} is not installed", "pip install . in a checkout of dfm_async")
        return
    needed = [Requirement(text) for text in ours.requires or ()]
    found = _look(needed, "")
    if found.missing or found.unfit:
        detail = ", ".join(found.missing + found.unfit)
        yield Finding("packages", "bad", detail, "pip install --upgrade . in a checkout of dfm_async")
    else:
        yield Finding("packages", "ok", ", ".join([f"{_NAME} {ours.version}", *found.fit]))
    for extra in sorted(ours.metadata.get_all("Provides-Extra") or ()):
        if extra != "all":
            yield _extra(needed, extra)


def _extra(needed: list[Requirement], extra: str) -> Finding:
    found = _look(needed, extra)
    install = install_hint(extra)
    if found.unfit:
        return Finding(f"extra {extra}", "warn", ", ".join(found.unfit), f"{install} --upgrade")
    if found.missing:
        return Finding(f"extra {extra}", "ok", f"not installed; if you want it: {install}")
    return Finding(f"extra {extra}", "ok", ", ".join(found.fit))


@dataclass(frozen=True, slots=True)
class _Packages:
    """The packages of an extra, or those that are always needed: which fit, which do not, and which are missing."""

    fit: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def _look(needed: list[Requirement], extra: str) -> _Packages:
    found = _Packages()
    for requirement in needed:
        if canonicalize_name(requirement.name) == _NAME or not _applies(requirement, extra):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            found.missing.append(f"{requirement.name} is missing")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            found.fit.append(f"{requirement.name} {version}")
        else:
            found.unfit.append(f"{requirement.name} is {version}, needed is {requirement.specifier}")
    return found


def _applies(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    if marker is None:
        return not extra
    if extra and marker.evaluate({"extra": ""}):
        return False  # it is always needed
    return marker.evaluate({"extra": extra})
