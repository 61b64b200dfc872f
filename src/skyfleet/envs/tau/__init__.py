"""tau-bench and tau2: conversations with a user, by the public packages as they are."""
