"""Which tasks are worth it."""
