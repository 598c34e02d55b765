"""The classes that a site's operations take and return: what others send may be of these, and of no others."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from dfm_async.errors import LoadingError
from dfm_async.federation.operation import Adapter, Signature
from dfm_async.model.resources import ClassPath
from dfm_async.site.construction import lacks_body
from dfm_async.site.loading import Loader
from dfm_async.wire.classes import KnownClasses

__all__ = ["known_classes"]

_log = logging.getLogger(__name__)


def known_classes(adapters: Iterable[Adapter], loader: Loader) -> KnownClasses:
    """Reads the signatures of operations. Imports classes that are named by a path: blocks as long as that takes."""
    known = KnownClasses()
    for adapter in adapters:
        signature = adapter.signature
        if isinstance(adapter.code, ClassPath):
            try:
                kind = loader.load(adapter.code.path, f"operation {adapter.operation!r}", lacks_body)
                signature = Signature.of(kind.body, bound=True)
            except (LoadingError, TypeError, ValueError):  # told to whoever calls it
                _log.debug("the signature of operation %s cannot be read", adapter.operation, exc_info=True)
        for hint in signature.named:
            known.add(hint)
    return known
