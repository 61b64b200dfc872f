"""Why: what a run did, read offline and without torch."""
