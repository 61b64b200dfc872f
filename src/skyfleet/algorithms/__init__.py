"""What to learn from it."""
