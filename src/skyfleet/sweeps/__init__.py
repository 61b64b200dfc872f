"""Sweeps: runs over the values of keys, data sizes and seeds, compared on one page."""
