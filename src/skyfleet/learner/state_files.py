"""Read the files of tensors in a checkpoint, which may come from somebody else."""

from __future__ import annotations

import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from skyfleet.errors import CheckpointError


def load_state(path: Path) -> dict[str, Any]:
    """What `torch.save` wrote, on the CPU: the device would hold everything twice.

    Only tensors and plain data are read; CheckpointError for anything else.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # about pickles of other protocols
            state = torch.load(path, weights_only=True, map_location="cpu")
    except UnpicklingError as error:
        # Not torch's message, which recommends weights_only=False.
        raise CheckpointError(
            f"{path} contains objects other than tensors and plain data, which are never loaded "
            "because they could run code; choose another checkpoint"
        ) from error
    except (RuntimeError, EOFError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read: {reason}; choose another checkpoint"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} contains a {type(state).__name__} and not a state; choose another checkpoint"
        )
    return state
