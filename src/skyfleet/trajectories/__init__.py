"""Trajectories: the record of an episode, its archive and its index."""
