"""Telecom: the support of a mobile phone company."""
