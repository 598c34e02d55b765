"""Federations as files."""
