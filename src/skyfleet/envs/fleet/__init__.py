"""Fleet: its tasks as environments."""
