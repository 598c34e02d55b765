"""A federation whose sites greet people."""
