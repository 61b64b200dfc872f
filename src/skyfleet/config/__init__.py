"""The configuration of a run: one typed tree with SkyRL's key names."""
