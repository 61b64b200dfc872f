"""Print how many nodes of the Ray cluster at RAY_ADDRESS are alive."""

from __future__ import annotations

import logging
import sys

import ray

ray.init(log_to_driver=False, logging_level=logging.ERROR)
sys.stdout.write(f"{sum(node['Alive'] for node in ray.nodes())}\n")
ray.shutdown()
