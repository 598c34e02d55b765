"""NVFLARE 2.9: programs and jobs that talk over its own cells (extra ``flare``)."""
