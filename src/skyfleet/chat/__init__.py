"""Chat messages, chat templates, tool-call formats and token transcripts."""
