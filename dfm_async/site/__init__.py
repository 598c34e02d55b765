"""What the code of operations sees of its site: objects, secrets, cached files."""
