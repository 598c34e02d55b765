"""Federations as files: ``federation.dfm.yaml``, read and written."""
