"""Fleet, both ways: its tasks as environments, and our worlds behind its interface."""
