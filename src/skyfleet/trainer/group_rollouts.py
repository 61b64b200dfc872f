"""GroupRollouts: plays groups beside training, in the order of the sampler, and hands them out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from skyfleet.algorithms.filters import FilterResult
from skyfleet.errors import NoLearningSignalError
from skyfleet.rollouts.episode import collect
from skyfleet.trainer.group_journal import GroupJournal, RecordedBatch
from skyfleet.trainer.open_groups import OpenGroup, OpenGroups
from skyfleet.trainer.rollouts import RolloutCollector
from skyfleet.trainer.staleness import count_versions, staleness_metrics
from skyfleet.trajectories.journal_segment import JournalRecord
from skyfleet.trajectories.records import encode_episode
from skyfleet.trajectories.trajectory import Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenGroups:
    """What one step is trained on."""

    groups: list[Group]
    """In the order of the sampler, with those that were replaced."""
    kept: FilterResult
    episodes: list[tuple[Trajectory, bytes]]
    """With their lines in the trajectory archive."""
    restored: list[Trajectory]
    """Played by an earlier process."""
    open_tasks: frozenset[str]
    """Tasks of groups that later steps are trained on."""
    metrics: dict[str, float]

    def is_open(self, session: str) -> bool:
        """Whether a session may belong to a group of a later step."""
        return session.rpartition("/")[0] in self.open_tasks


@dataclass(slots=True, kw_only=True)
class GroupRollouts:
    collector: RolloutCollector
    groups: OpenGroups
    journal: GroupJournal
    get_version: Callable[[], int]
    """The version of the weights that the engine serves, and the learner's between updates."""
    n_workers: int
    """Groups in flight."""
    refills: bool = False
    """Groups from which nothing is learnt are replaced."""
    max_refill_batches: int = -1
    """Stop the run if this many batches of one step are replaced; -1 never does."""
    step: int = 0
    """The step that is collected."""
    _semaphore: asyncio.Semaphore = field(init=False)
    _running: dict[asyncio.Task[None], OpenGroup] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _error: BaseException | None = None
    _batches: dict[int, RecordedBatch] | None = None
    """What a killed process trained on after the checkpoint; None before the first step."""
    _records: dict[int, list[JournalRecord]] = field(default_factory=dict)
    """What it recorded of groups that are not trained on yet, by number."""
    _idle_since: float | None = None
    _idle_seconds: float = 0.0
    """Without a group in flight, since the last step."""

    def __post_init__(self) -> None:
        self._semaphore = asyncio.Semaphore(self.collector.max_concurrent)

    def advance(self, step: int) -> None:
        """`step` is collected from here on, with the weights that the engine now serves."""
        if step == self.step:
            return
        if self._batches is None:
            if not self.journal.is_on:
                self.journal.remove_after(step)  # else a later start would take them for its own
            self._batches = self.journal.read_batches(after=step - 1)
            self._restore(list(self.groups))
            self._idle_since = perf_counter()
        self.step = step
        self.groups.forget_trained(step - 1)
        self._draw()
        if not self._repeats(step):
            self._end_repetition()
            self._draw()
            self._start_groups()

    async def take(self) -> TakenGroups:
        """Wait for the groups that this step is trained on; they are durable on return."""
        start, step = perf_counter(), self.step
        while (chosen := self._choose()) is None:
            self._changed.clear()
            await self._changed.wait()
        waited = perf_counter() - start
        version = self.get_version()
        assigned = chosen if self._repeats(step) else self.groups.add_dropped(chosen)
        self.groups.assign(step, assigned)
        chosen = [group for group in assigned if not group.is_dropped]
        if not self._repeats(step):
            numbers = tuple(group.number for group in assigned)
            await self.journal.add_batch(step, RecordedBatch(version, numbers))
        groups = [group.group for group in assigned if group.group is not None]
        kept = self.collector.filter_groups(groups)
        seconds, self.journal.seconds = self.journal.seconds, 0.0
        return TakenGroups(
            groups=groups,
            kept=kept,
            episodes=[
                (group.episodes[sample], group.lines[sample])
                for group in assigned
                for sample in sorted(group.episodes)
            ],
            restored=[group.episodes[sample] for group in assigned for sample in group.restored],
            open_tasks=frozenset(g.task.key for g in self.groups if g.trained_step is None),
            metrics={
                **staleness_metrics([g.group for g in chosen if g.group is not None], version),
                "timing/learner_idle": waited,
                "timing/generation_idle": self._take_idle_seconds(),
                "async/groups_in_flight": float(len(self._running)),
                "async/groups_waiting": float(sum(g.is_finished for g in self.groups)),
                "async/groups_replaced": float(len(assigned) - len(chosen)),
                "timing/journal": seconds,
            },
        )

    async def close(self) -> None:
        """Cancel the groups in flight; a resumed run plays what is not finished of them again."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.journal.close()

    def _choose(self) -> list[OpenGroup] | None:
        if self._error is not None:
            raise self._error
        if self._repeats(self.step):
            assert self._batches is not None
            return [self.groups[number] for number in self._batches[self.step].numbers]
        return self.groups.select(self.step)

    def _draw(self) -> None:
        """Draw what may be started, with what an earlier process recorded of it."""
        while new := self.groups.draw(self.collector.sampler, self.step):
            self._restore(new)
            if not self._repeats(self.step):
                self._end_repetition()

    def _start_groups(self) -> None:
        """Start groups in the order of the sampler while there are places."""
        playing = {group.task.key for group in self._running.values()}
        for group in self.groups.list_startable(self.step):
            # Two groups of one task at once would share the engine's sessions.
            if len(self._running) >= self.n_workers or group.task.key in playing:
                break
            group.is_running = True
            if group.started_step is None:
                group.started_step = self.step
            playing.add(group.task.key)
            task = asyncio.create_task(self._play(group))
            self._running[task] = group
            task.add_done_callback(self._end_group)
        if self._running and self._idle_since is not None:
            self._idle_seconds += perf_counter() - self._idle_since
            self._idle_since = None

    async def _play(self, group: OpenGroup) -> None:
        collector, task, version = self.collector, group.task, self.get_version()

        def finish(episode: Trajectory) -> None:
            line = encode_episode(episode)
            self.journal.add(group, version, episode, line)
            group.episodes[episode.sample], group.lines[episode.sample] = episode, line

        await collect(
            [task],
            collector.open_env,
            collector.agent(self.groups.draw_of(group)),
            collector.limits,
            n_samples=collector.n_samples,
            max_concurrent=collector.max_concurrent,
            on_finished=finish,
            recorded={(task.key, sample): episode for sample, episode in group.episodes.items()},
            tracer=collector.tracer and collector.tracer.bind(set="train", step=self.step),
            semaphore=self._semaphore,
            run=collector.run,
        )
        self._finish(group)

    def _finish(self, group: OpenGroup) -> None:
        group.is_running = False
        group.finish(self.collector.n_samples)
        self.groups.add_finished(group)
        if self.refills and group.group and not self.collector.filter_groups([group.group]).groups:
            self.groups.drop(group)

    def _end_group(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task)
        if not self._running:
            self._idle_since = perf_counter()
        if task.cancelled():
            return
        self._error = self._error or task.exception()
        if self._error is None:
            try:
                self._check_refill()
                self._draw()
                self._start_groups()
            except Exception as error:
                self._error = error
        self._changed.set()

    def _check_refill(self) -> None:
        replaced = sum(g.is_dropped and g.trained_step is None for g in self.groups)
        limit = self.max_refill_batches
        if 0 < limit <= replaced // self.groups.batch_size:
            raise NoLearningSignalError(
                f"trainer.fully_async.sample_full_batch=true replaced {replaced} groups in one step, "
                f"which is trainer.algorithm.dynamic_sampling.max_sample_batches={limit} batches: their "
                "attempts all earned the same reward or have no grade; raise it, raise "
                "generator.n_samples_per_prompt, or choose tasks that are neither too hard nor too easy"
            )

    def _take_idle_seconds(self) -> float:
        now = perf_counter()
        if self._idle_since is not None:
            self._idle_seconds += now - self._idle_since
            self._idle_since = now
        seconds, self._idle_seconds = self._idle_seconds, 0.0
        return seconds

    def _restore(self, groups: Sequence[OpenGroup]) -> None:
        """Give groups the episodes that an earlier process played, usable or not yet."""
        for number, records in self.journal.read_draw(groups).items():
            self._records[number] = records
            self._add_records(self.groups[number], records)

    def _add_records(self, group: OpenGroup, records: Sequence[JournalRecord]) -> None:
        for record in records:
            sample = record.place.sample
            group.episodes[sample], group.lines[sample] = record.episode, record.line
            group.restored.add(sample)
        if len(group.episodes) == self.collector.n_samples:
            self._finish(group)

    def _repeats(self, step: int) -> bool:
        """Whether a killed process trained on this step, from the same weights, and all is there."""
        batch = (self._batches or {}).get(step)
        return (
            batch is not None
            and batch.policy_version == self.get_version()
            and all(n in self.groups and self.groups[n].group is not None for n in batch.numbers)
        )

    def _end_repetition(self) -> None:
        """No step is repeated any more: what other weights than this run's sampled is played again."""
        if not self._records and not self._batches:
            return
        version, step, self._batches = self.get_version(), self.step, {}
        oldest = version - self.groups.max_staleness_steps
        unusable: list[JournalRecord] = []
        for number, records in self._records.items():
            if number not in self.groups:
                continue  # a repeated step trained on it
            group, usable, began = self.groups[number], list[JournalRecord](), version
            for record in records:
                versions = count_versions(record.episode) or {record.policy_version: 1}
                if oldest <= min(versions) and max(versions) <= version:
                    usable.append(record)
                    began = min(began, *versions)
                else:
                    unusable.append(record)
            if group.group is not None:
                self.groups.forget_finished(group)
            group.episodes, group.lines, group.restored, group.is_dropped = {}, {}, set(), False
            if usable:
                group.started_step = step - (version - began)
            self._add_records(group, usable)
        self._records = {}
        if unusable:
            self.journal.discard(unusable, after=step - 1)
