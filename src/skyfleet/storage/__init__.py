"""Storage: atomic local files and folders, objects in buckets, and background uploads."""
