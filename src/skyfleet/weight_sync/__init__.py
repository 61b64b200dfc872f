"""New weights reach the engines."""
