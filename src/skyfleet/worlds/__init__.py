"""The built-in environments ("worlds"): each is a SQLite database, typed tools and task templates."""
