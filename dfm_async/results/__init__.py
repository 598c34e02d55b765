"""A job's log of events: offsets, retention, backpressure, readers."""
