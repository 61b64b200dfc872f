"""Fused ops of the decoder layers for GPUs, each with its gradient."""
