"""Applications of the federation."""
