"""What users hold: sessions, jobs, iterators over results, callbacks."""
