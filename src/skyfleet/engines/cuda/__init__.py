"""The embedded engine on CUDA: paged keys and values, prompts and decoding in CUDA graphs."""
