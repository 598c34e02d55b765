"""A small federation with one of everything that a file can say, written in several files."""
