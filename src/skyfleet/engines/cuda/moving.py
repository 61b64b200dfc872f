"""Moving: values from the host to the device, without waiting for what the device is doing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def moved(
    values: Sequence[float] | np.ndarray, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        # A copy out of pinned memory is queued; for any other the host would wait its turn.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
