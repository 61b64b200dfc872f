"""HTML report of one or several runs, as a single self-contained page."""
