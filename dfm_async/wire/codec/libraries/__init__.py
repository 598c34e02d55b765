"""Codecs of well-known libraries, one module for each. They are imported with the first value of the library."""
