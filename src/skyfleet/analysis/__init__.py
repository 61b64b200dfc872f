"""Analysis of recorded runs: reports, failure classes, the viewer; works offline, without torch."""
