"""``dfm-async flare``: federations on NVIDIA FLARE, on this machine and distributed."""
