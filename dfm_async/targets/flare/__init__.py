"""Jobs run over the sites of a federation on NVIDIA FLARE."""
