"""The decoder's layers on a GPU: few kernels, each forward with its gradient."""
