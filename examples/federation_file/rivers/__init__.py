"""A federation of three sites that watch rivers: ``federation.dfm.yaml`` says what they offer, ``adapters`` does it."""
