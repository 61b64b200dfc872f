"""Rollouts: the agent loop, conversations and scripted agents."""
