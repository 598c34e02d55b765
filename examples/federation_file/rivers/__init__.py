"""A federation of three sites that watch rivers: ``federation.dfm.yaml`` declares it, ``adapters`` implements it."""
