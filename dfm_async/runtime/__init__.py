"""Runs nets at a site: calls operations, carries tokens, streams and results."""
