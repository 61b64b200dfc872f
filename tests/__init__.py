"""One folder a room; a package, because some installed ones ship a `tests` of their own."""
