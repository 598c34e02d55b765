"""Plain values that cross a border: ids, status, events, limits, policies."""
