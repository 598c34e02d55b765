"""Tasks and results between a site and the programs that do its work."""
