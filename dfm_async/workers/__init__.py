"""The worker processes of a site: their start, output, heartbeats and end. Targets assign jobs to them."""
