"""Data curation: validation of tasks, mutation testing of verifiers, quarantine, statistics."""
