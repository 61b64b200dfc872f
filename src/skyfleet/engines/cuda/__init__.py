"""Inference on one NVIDIA GPU: scheduler, paged KV cache, prefill, decoding, CUDA graphs."""
