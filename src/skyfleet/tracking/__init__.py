"""Trackers: one row of metrics per step, written to the console, files, TensorBoard or W&B."""
