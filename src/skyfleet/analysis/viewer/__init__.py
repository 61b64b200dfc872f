"""Browser-based viewer of the episodes of a run."""
