"""Training: the loop, its wiring, resuming, warm start and evaluation during training."""
