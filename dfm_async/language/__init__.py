"""The pipeline language: expressions, statements, the builder, JSON and text. Pure."""
