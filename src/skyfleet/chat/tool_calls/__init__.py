"""Tool-call formats: a parser and a writer per format."""
