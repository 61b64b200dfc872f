"""Conversational worlds: an agent serves one simulated user under a policy, with tools."""
