"""The `skyfleet` command line."""
