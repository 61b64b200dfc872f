"""Samples in, new weights out."""
