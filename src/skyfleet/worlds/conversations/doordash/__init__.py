"""Doordash: the support of a food delivery service."""
