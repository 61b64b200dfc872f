"""How a verifier asks what changed."""
