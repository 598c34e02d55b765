"""The worker processes of a site: how they start, what they say, how they end. Targets put jobs on them."""
