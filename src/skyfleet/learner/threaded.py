"""ThreadedLearner: a learner in this process whose steps run in a thread of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyfleet.algorithms.sample import Sample
from skyfleet.learner.learner import StepReport
from skyfleet.learner.single_device import SingleDeviceLearner
from skyfleet.models.decoder import Decoder


class ThreadedLearner:
    """The event loop, and the engine on it, go on during a step.

    One thread for all steps, because OpenMP keeps a pool of threads for each thread that calls it. On
    a GPU it has a CUDA stream of its own: the engine's kernels are not queued behind the learner's.
    """

    def __init__(self, learner: SingleDeviceLearner) -> None:
        self._learner = learner
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        device = learner.decoder.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def decoder(self) -> Decoder:
        return self._learner.decoder

    @property
    def policy_version(self) -> int:
        return self._learner.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._learner.policy_version = version

    @property
    def is_within_update(self) -> bool:
        return self._learner.is_within_update

    async def step(self, samples: Sequence[Sample]) -> StepReport:
        return await self._run(self._learner.step(samples))

    async def sft_step(self, samples: Sequence[Sample]) -> StepReport:
        return await self._run(self._learner.sft_step(samples))

    def renew_reference(self) -> None:
        self._learner.renew_reference()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._learner.named_weights()

    def save(self, folder: Path) -> None:
        self._learner.save(folder)

    def load(self, folder: Path) -> None:
        self._learner.load(folder)

    async def _run(self, step: Coroutine[Any, Any, StepReport]) -> StepReport:
        """A cancellation takes effect after the step: half an update must not be saved."""
        result = asyncio.wrap_future(self._thread.submit(self._run_in_thread, step))
        task, n_cancelled = asyncio.current_task(), 0
        assert task is not None
        while not result.done():
            try:
                await asyncio.wait([result])
            except asyncio.CancelledError:
                n_cancelled += 1
                task.uncancel()
        for _ in range(n_cancelled):
            task.cancel()
        return result.result()

    def _run_in_thread(self, step: Coroutine[Any, Any, StepReport]) -> StepReport:
        with torch.cuda.stream(self._stream):
            if self._stream is not None:
                # The last weight sync reads the weights on the default stream.
                self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
            report = asyncio.run(step)
            if self._stream is not None:
                self._stream.synchronize()
        return report
