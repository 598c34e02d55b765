"""How notebooks and terminals show things: drawings, tables, jobs while they run. Needs IPython only where it runs."""
