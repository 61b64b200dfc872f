"""Our engine behind OpenAI's API, so that any agent written against it can be played and learned from."""
