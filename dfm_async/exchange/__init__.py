"""Programs outside the federation: they take tasks from a site, and hand back results."""
