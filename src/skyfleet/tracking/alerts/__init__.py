"""Alerts: messages about a run, sent to Slack and webhooks in the background."""
