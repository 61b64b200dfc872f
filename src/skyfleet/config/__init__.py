"""What a run is: one typed tree with SkyRL's key names."""
