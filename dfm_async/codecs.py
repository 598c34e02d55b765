"""Codecs for the types of applications: how their values become data that can be sent and stored."""

from dfm_async.base.lazy import lazy_imports

with lazy_imports(__name__):
    from dfm_async.wire.codec.registry import register as register
