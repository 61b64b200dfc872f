"""Moved to `skyfleet.algorithms.registry`; the importers outside this package follow."""

from skyfleet.algorithms.registry import build_policy_loss as build_policy_loss
