"""Discovery: what values the fields of a pipeline can have, as adapters advise."""
