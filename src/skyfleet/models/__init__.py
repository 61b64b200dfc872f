"""Model weights and forward passes: decoders, loading, LoRA and fused GPU kernels."""
