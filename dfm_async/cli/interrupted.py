"""Ctrl-C, before a command handles it."""

from __future__ import annotations


class Interrupted(SystemExit):
    """Ctrl-C, before a command handles it."""
