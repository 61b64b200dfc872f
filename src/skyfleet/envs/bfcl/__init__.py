"""BFCL: single- and multi-turn function calling, checked by the package's own checker."""
