"""Tasks: loading, splitting, preparing, sampling and curriculum."""
