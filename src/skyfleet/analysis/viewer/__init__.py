"""A page in the browser to leaf through a run's episodes."""
