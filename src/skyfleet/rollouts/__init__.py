"""Doing it: the agent loop."""
