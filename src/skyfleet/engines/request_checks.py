"""Requests that an engine cannot serve."""

from __future__ import annotations

from skyfleet.engines.http_client import RequestRejectedError
from skyfleet.engines.sampling_params import SamplingParams


def reject_logits_processors(sampling: SamplingParams, engine: str) -> None:
    """For engines that sample where no Python runs between two tokens."""
    if sampling.logits_processors:
        raise RequestRejectedError(
            f"{engine} samples without logits processors, which constrained output "
            "(response_format, tool_choice=required) and top_logprobs need; leave them out, or serve "
            "with trainer.device=cpu"
        )
