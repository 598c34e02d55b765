"""Typed modules of federations, for editors and type checkers: what is known at run time, written down."""

from __future__ import annotations

from dfm_async.federation.stubs.module import stubs

__all__ = ["stubs"]
