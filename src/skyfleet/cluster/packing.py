"""Pickle what another process needs, by cloudpickle where pickle cannot."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from skyfleet.envs.worker_process import NotMovableError, pack_source
from skyfleet.errors import ClusterError


def pack_function(build: Callable[[], Any], what: str) -> bytes:
    """Pickle a function without arguments, with what it holds; ClusterError if that is impossible."""
    try:
        packed = pickle.dumps(build)
        # By reference to __main__ it would be looked for in the worker's own.
        if b"__main__" not in packed:
            return packed
    except Exception:  # whatever the user's objects raise
        pass
    try:
        return pack_source(build)
    except NotMovableError as error:
        raise ClusterError(
            f"{what} cannot be sent to rollout workers: {error}; make it a function or class of a "
            "module, such as environment.env_class=module:function, or set "
            "generator.num_rollout_workers_per_node=0"
        ) from None
