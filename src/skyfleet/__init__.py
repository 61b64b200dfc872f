"""skyfleet: language-model agents trained by reinforcement learning, with evidence."""
