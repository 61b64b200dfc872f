"""Weight transfer: how weights travel between processes: in buckets, or as deltas in a folder or bucket."""
