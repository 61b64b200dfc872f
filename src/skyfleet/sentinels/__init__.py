"""Sentinels: runtime invariant checks of every training step."""
