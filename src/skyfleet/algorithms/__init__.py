"""Advantage estimators, policy losses, KL, reductions and filters."""
