"""Where plans run: inline (one loop, no processes) and local (worker processes)."""
