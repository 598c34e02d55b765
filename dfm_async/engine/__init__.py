"""Runs jobs: their parameter sets, credit, stopping, losses and ends, the same on every target."""
