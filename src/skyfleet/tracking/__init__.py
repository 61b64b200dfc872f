"""Telling: one log call a step."""
