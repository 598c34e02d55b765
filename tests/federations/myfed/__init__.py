"""A federation that makes arrays at one site and pictures of them at another."""
