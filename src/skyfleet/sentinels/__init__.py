"""What has to be true at every hop, looked at on every step."""
