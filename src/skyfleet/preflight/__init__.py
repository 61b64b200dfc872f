"""Preflight: everything that a run needs, tried once before the run starts."""
