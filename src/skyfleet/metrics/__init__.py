"""Numbers about trajectories; pure functions."""
