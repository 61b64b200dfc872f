"""Environments: the Env protocol, the adapters and the verifiers."""
