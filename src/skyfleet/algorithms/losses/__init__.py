"""Policy losses: one small function each."""
