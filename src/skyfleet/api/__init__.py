"""The public Python API; `import skyfleet as sf` exports it, see docs/python_api.md."""
