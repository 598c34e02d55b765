"""What runs at a site: nets, calls of operations, tokens, streams and results."""
