"""An inference engine for one NVIDIA GPU: scheduler, paged KV cache, prefill, decoding, CUDA graphs."""
