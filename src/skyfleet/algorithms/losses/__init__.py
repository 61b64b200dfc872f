"""Policy losses: one function and one object with its facts per loss. Importing needs no torch."""
