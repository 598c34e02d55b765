"""Views in notebooks and terminals: drawings, tables, jobs while they run. Needs IPython only where it runs."""
