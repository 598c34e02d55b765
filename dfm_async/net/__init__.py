"""The token game of one site: what a net is, and how tokens move in it. Events in, effects out. Pure."""
