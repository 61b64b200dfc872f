"""The report: what a run did, as one page to look at."""
