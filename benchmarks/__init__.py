"""Benchmarks: one module per figure, each run as ``python -m benchmarks.<name>``; ``benchmarks.all`` runs them all."""
