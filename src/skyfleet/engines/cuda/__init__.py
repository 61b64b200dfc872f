"""The embedded engine on CUDA: paged keys and values, decoding in CUDA graphs."""
