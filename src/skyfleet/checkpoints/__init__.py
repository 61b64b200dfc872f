"""Remembering."""
