"""Cluster: rollout workers, engines and learner ranks as Ray actors on one node or many."""
