"""Simulates a run on hardware that is not here: its events, with measured or stored costs."""
