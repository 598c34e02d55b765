"""Transports: how messages get from one end to the other."""
