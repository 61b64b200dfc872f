"""A Fleet-compatible HTTP server that serves the built-in environments."""
