"""An engine behind OpenAI's API, for agents that were written against that API."""
