"""Inference engines: in process on CPU and GPU, vLLM, HTTP clients, and the engine pool."""
