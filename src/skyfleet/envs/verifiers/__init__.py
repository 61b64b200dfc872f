"""Verifiers: grade an episode by what it changed in a database."""
