"""Launching: a run as a SkyPilot task on any cloud, and the runs that were launched."""
