"""Inference engines: in-process engines for CPU and GPU, vLLM, HTTP clients, and the engine pool."""
