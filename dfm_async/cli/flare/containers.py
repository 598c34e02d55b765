"""``dfm-async flare deploy``."""
