"""Measure a MachineProfile: the engine, the learner and the process around them, on this machine.

Costs are measured apart, not fitted to steps: decoding and prefill by requests to the engine, updates
by samples of different sizes, and the process by what its episodes take beside the engine. Times are
of the processor where torch has one thread, so that other processes disturb them less.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time, thread_time
from typing import TYPE_CHECKING, Any, cast

from skyfleet.analysis.run_folder import open_run
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.simulation.machine_profile import MachineProfile, interpolate
from skyfleet.simulation.quiet_clock import read_quiet_clock
from skyfleet.simulation.recorded_workload import record_workload
from skyfleet.storage.local import find_existing_folder
from skyfleet.trainer.plan_run import describe_machine
from skyfleet.trainer.probe import configure_probe

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from skyfleet.algorithms.sample import Sample
    from skyfleet.trainer.assemble import GivenObjects
    from skyfleet.trainer.callbacks import StepResult
    from skyfleet.trainer.run import Run
    from skyfleet.trajectories.trajectory import Group

N_STEPS = 3
_SHORT, _LONG = 4, 32
"""Sampled tokens of the two requests whose difference is the decoding."""
_REPEATS = 5
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


async def measure_machine(
    config: RunConfig,
    *,
    given: GivenObjects | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> MachineProfile:
    """Trains a few steps in a temporary folder beside the run's checkpoints, which is removed."""
    if config.generator.backend != "embedded":
        raise ConfigError(
            f"generator.backend={config.generator.backend}: --measure measures the embedded engine; "
            "set generator.backend=embedded, or use a stored profile with --profile"
        )
    from skyfleet.trainer.loops import train_steps
    from skyfleet.trainer.training_run import open_training_run

    root = find_existing_folder(Path(config.trainer.ckpt_path))
    with TemporaryDirectory(prefix=".plan-", dir=root, ignore_cleanup_errors=True) as folder:
        measured = _configure(config, Path(folder))
        async with open_training_run(measured, given=given, on_progress=on_progress) as run:
            steps = cast("AsyncGenerator[StepResult, None]", train_steps(run))
            async with aclosing(steps):
                results = [result async for result in steps]
            on_progress("measuring the engine, the learner and the episodes")
            return await _Measurement(config, run, results).measure()


def _configure(config: RunConfig, folder: Path) -> RunConfig:
    """The first steps, without evaluation."""
    probe = configure_probe(config, folder, N_STEPS)
    trainer = probe.trainer.model_copy(update={"eval_before_train": False, "eval_interval": -1})
    return probe.model_copy(update={"trainer": trainer})


@dataclass(frozen=True, slots=True)
class _Measurement:
    config: RunConfig
    run: Run
    results: Sequence[StepResult]

    async def measure(self) -> MachineProfile:
        groups = self.results[-1].groups
        decode, context, prefill, prefill_token = await self._measure_engine()
        samples = self.run.compute_samples(groups)
        if not samples:
            raise ConfigError(
                "no measured group had attempts with different rewards, so no update was measured; "
                "raise generator.n_samples_per_prompt, or choose easier tasks"
            )
        fixed, per_token, per_square = await self._measure_learner(samples)
        engine_slowdown, learner_slowdown = 1.0, 1.0
        if self.config.trainer.fully_async.enabled:
            engine_slowdown, learner_slowdown = await self._measure_contention(samples)
        turn, episode = await self._measure_host()
        return MachineProfile(
            machine=describe_machine(),
            model=self.config.trainer.policy.model.path,
            backend=self.config.generator.backend,
            is_async=self.config.trainer.fully_async.enabled,
            decode_seconds=decode,
            context_seconds=context,
            prefill_seconds=prefill,
            prefill_token_seconds=prefill_token,
            turn_seconds=turn,
            episode_seconds=episode,
            update_fixed_seconds=fixed,
            update_token_seconds=per_token,
            update_square_seconds=per_square,
            push_seconds=await _time(lambda: self.run.inference.push(self.run.learner)),
            fixed_token_seconds=self._measure_rest(),
            engine_slowdown=engine_slowdown,
            learner_slowdown=learner_slowdown,
            workload=record_workload([g for result in self.results for g in result.groups]),
        )

    async def _measure_engine(self) -> tuple[dict[int, float], float, float, float]:
        """Seconds per step by sequences, per token of context, per prefill and per token of it."""
        capacity = self.config.max_episode_tokens - _LONG - 1
        short, long = max(8, capacity // 16), max(16, capacity * 3 // 4)
        most = self.config.generator.max_num_seqs
        sizes = [size for size in _SIZES if size < most] + [min(most, 2 * _SIZES[-1])]
        steps = {size: await self._measure_decoding(size, short) for size in sizes}
        largest = min(sizes[-1], 32)
        slope = await self._measure_decoding(largest, long) - interpolate(steps, largest)
        context = max(0.0, slope / (largest * (long - short)))
        decode = {
            size: max(seconds - context * size * (short + _LONG / 2), 1e-6)
            for size, seconds in steps.items()
        }
        once = interpolate(decode, largest)
        prefills = [
            (prompt, max(0.0, await self._measure_requests(largest, prompt, 1) - once) / largest)
            for prompt in (short, long)
        ]
        return decode, context, *fit_line(prefills)

    async def _measure_decoding(self, n: int, prompt: int) -> float:
        long = await self._measure_requests(n, prompt, _LONG)
        return (long - await self._measure_requests(n, prompt, _SHORT)) / (_LONG - _SHORT)

    async def _measure_requests(self, n: int, prompt: int, n_sampled: int) -> float:
        """`n` requests at once, whose prompts differ from the first token on."""
        from skyfleet.engines.sampling_params import SamplingParams

        engine: Any = self.run.inference.engines[0]
        given = self.config.generator.sampling_params
        sampling = SamplingParams(
            max_generate_length=n_sampled,
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=given.top_k,
            min_p=given.min_p,
            seed=1,
        )
        vocabulary = engine.decoder.vocab_size

        async def ask() -> None:
            await asyncio.gather(
                *(
                    engine.generate(
                        [(13 * i + 7 * k + 1) % vocabulary for k in range(prompt)],
                        sampling,
                        session=f"measure/{i}",
                    )
                    for i in range(n)
                )
            )

        times = []
        for _ in range(_REPEATS):
            times.append(await _time(ask, repeats=1))
            for i in range(n):
                await engine.release(f"measure/{i}")
            await engine.sleep()  # drops the cache
            await engine.wake()
        return min(times)

    async def _measure_learner(self, samples: Sequence[Sample]) -> tuple[float, float, float]:
        """Seconds of an update without tokens, per token, and per squared length of a sample."""
        from scipy.optimize import nnls

        short = self.run.compute_samples(await self._collect(5_000, max_turns=1))
        parts = [samples, samples[::2], samples[::4], short or samples[:1], samples]
        rows, seconds = [], []
        for part in parts:
            lengths = [len(sample.token_ids) for sample in part]
            rows.append((1.0, float(sum(lengths)), float(sum(n * n for n in lengths))))
            seconds.append(await _time(partial(self.run.learner.step, part), repeats=_REPEATS))
        # Divided by their times, so that small updates count as much as large ones.
        scaled = [[x / y for x in row] for row, y in zip(rows, seconds, strict=True)]
        fixed, per_token, per_square = nnls(scaled, [1.0] * len(rows))[0].tolist()
        return fixed, per_token, per_square

    async def _measure_contention(self, samples: Sequence[Sample]) -> tuple[float, float]:
        """How much slower rollouts and an update are at the same time."""
        learner = self.run.learner
        start, computed = read_quiet_clock(), thread_time()
        for number in range(_REPEATS):
            await self._collect(20_000 + number)
        rollout, computed = read_quiet_clock() - start, thread_time() - computed
        start = read_quiet_clock()
        for _ in range(_REPEATS):
            await learner.step(samples)
        update = (read_quiet_clock() - start) / _REPEATS
        updates: list[float] = []
        plays = True

        async def learn() -> None:
            while plays:
                start = read_quiet_clock()
                await learner.step(samples)
                updates.append(read_quiet_clock() - start)

        learning = asyncio.create_task(learn())
        start = read_quiet_clock()
        for number in range(_REPEATS):
            await self._collect(30_000 + number)
        beside = read_quiet_clock() - start
        plays = False
        await learning
        # Waits for environments are the same in both.
        return (
            max(1.0, 1 + (beside - rollout) / computed),
            max(1.0, fmean(updates[:-1] or updates) / update),
        )

    async def _collect(self, step: int, max_turns: int | None = None) -> Sequence[Group]:
        """Rollouts of one batch, as a step plays them."""
        collector = self.run.rollouts
        if max_turns is not None:
            collector = replace(collector, limits=replace(collector.limits, max_turns=max_turns))
        version = self.run.learner.policy_version
        with self.run.journal.open_step(step, policy_version=version) as journal:
            groups, _ = await collector.collect(step, lambda *_: None, journal)
        return groups

    async def _measure_host(self) -> tuple[float, float]:
        """Seconds per turn and per episode: what rollouts take beside the engine, with one turn per
        episode and with as many as configured."""
        points: list[tuple[float, float]] = []
        engine: Any = self.run.inference.engines[0]
        most = self.config.generator.max_turns
        for number, max_turns in enumerate((1, most, 1, most)):
            start, computed = thread_time(), engine.compute_seconds
            groups = await self._collect(10_000 + number, max_turns)
            spent = thread_time() - start - (engine.compute_seconds - computed)
            n_episodes = sum(len(group.trajectories) for group in groups)
            n_turns = sum(len(t.turns) for group in groups for t in group.trajectories)
            points.append((n_turns / n_episodes, spent / n_episodes))
        if most == 1 or points[1][0] == points[0][0]:
            return min(seconds for _, seconds in points), 0.0
        episode, turn = fit_line(points)
        return turn, episode

    def _measure_rest(self) -> float:
        """Of a step, per token."""
        rest = []
        timing = {int(row["step"]): row for row in open_run(self.run.folder).timing()}
        for result in self.results[1:]:
            metrics = timing[result.number]
            known = sum(
                metrics.get(f"timing/{name}", 0.0)
                for name in ("generate", "train_critic_and_policy", "sync_weights")
            )
            n_tokens = sum(
                len(one.token_ids)
                for group in result.groups
                for trajectory in group.trajectories
                for one in trajectory.transcripts
            )
            rest.append(max(0.0, metrics["timing/step"] - known) / max(1, n_tokens))
        return median(rest)


def _clock() -> float:
    import torch

    return process_time() if torch.get_num_threads() == 1 else perf_counter()


async def _time(work: Callable[[], Awaitable[object]], *, repeats: int = _REPEATS) -> float:
    times = []
    for _ in range(repeats):
        start = _clock()
        await work()
        times.append(_clock() - start)
    return min(times)


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Value at 0 and slope, by least squares; neither is negative."""
    x, y = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((a - x) ** 2 for a, _ in points)
    slope = sum((a - x) * (b - y) for a, b in points) / spread if spread else 0.0
    slope = min(max(0.0, slope), y / x if x else 0.0)
    return y - slope * x, slope
