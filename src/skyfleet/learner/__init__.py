"""Policy updates: batching, losses, optimizer, critic and KL reference."""
