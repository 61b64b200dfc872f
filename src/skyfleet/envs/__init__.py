"""Where it is done: one Env is one episode."""
