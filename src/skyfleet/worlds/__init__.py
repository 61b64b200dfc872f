"""The worlds that ship: a database, typed tools and task templates each."""
