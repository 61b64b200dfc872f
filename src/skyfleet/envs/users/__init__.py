"""Simulated users: the other side of a conversation, scripted, rule-based or played by a model."""
