"""Checkpoints: save, find, load, resume and retention."""
