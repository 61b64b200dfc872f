"""Tool calls, read out of a model's text."""
