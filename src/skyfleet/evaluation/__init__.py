"""Evaluation: scores with intervals, comparisons with verdicts, and model selection."""
