"""Metrics of episodes, confidence intervals and significance tests, as pure functions."""
