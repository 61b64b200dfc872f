"""Trainer: a run step by step, in sync or async code."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from skyfleet.api.arguments import show_arguments
from skyfleet.api.background import BackgroundLoopError, run_sync
from skyfleet.api.comparison import Evaluation
from skyfleet.api.tasks import load_given_tasks
from skyfleet.api.terminating import exit_after_saving
from skyfleet.api.train_plan import SAVING, TrainArguments, plan_training
from skyfleet.api.training import TrainResult
from skyfleet.api.trajectories import wrap_step
from skyfleet.checkpoints.resume import find_checkpoint
from skyfleet.errors import ConfigError
from skyfleet.storage.working_directory import find_working_directory
from skyfleet.streams import open_stdout
from skyfleet.trainer.callbacks import StepResult

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Unpack

    from skyfleet.tasks.task import Task
    from skyfleet.trainer import run as core
    from skyfleet.trainer.training_run import TrainingOutcome


T = TypeVar("T")


class Trainer:
    """A run to iterate over: `with` opens and closes it, each iteration trains one step.

    Takes the arguments of `sf.train`. However the block is left (the last step, `break`, an exception,
    Ctrl-C, SIGTERM), the steps that were trained are saved. After the loop, or a `break`, `evaluate`,
    `save` and the metrics of the last step are still there; `result` is what `sf.train` would have
    returned.
    `async with` and `async for` work too.

    >>> import skyfleet as sf
    >>> tasks = [{"prompt": f"Say the number {n}."} for n in range(4)]
    >>> with sf.Trainer("tiny", reward=lambda answer: float(len(answer) > 3), tasks=tasks, steps=2,
    ...                 eval=False, batch_size=2, algorithm=sf.GRPO(group_size=2, kl=0),
    ...                 sampling=sf.Sampling(max_tokens=4)) as trainer:
    ...     for step in trainer:
    ...         if step.reward is not None:
    ...             break
    ...     folder = trainer.save()
    >>> step.number, len(step.groups), folder.name, trainer.result.step
    (1, 2, 'global_step_1', 1)
    """

    @show_arguments(TrainArguments)
    def __init__(
        self, model: object = None, env: object = None, **arguments: Unpack[TrainArguments]
    ) -> None:
        self._model, self._env, self._arguments = model, env, arguments
        self._plan = plan_training("sf.Trainer", model, env, arguments)
        self._closing, self._signals = AsyncExitStack(), ExitStack()
        self._run: core.Run | None = None
        self._steps: AsyncIterator[StepResult] | None = None
        self._outcome: TrainingOutcome | None = None
        self._saved = False
        self._adhoc_sets: dict[str, Sequence[Task]] = {}

    @property
    def step(self) -> int:
        """The last step that was trained."""
        return self._opened().state.step

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._plan.folder

    @property
    def result(self) -> TrainResult:
        """The result so far, or after `with` the final one."""
        return TrainResult(self.folder, outcome=self._outcome, notes=self._plan.notes)

    def evaluate(self, tasks: object = None, *, name: str | None = None) -> Evaluation:
        """Evaluate the current policy on tasks, or without any on a configured set.

        Unset, `name` is that of the first configured set; for other tasks it is "adhoc", then
        "adhoc_2" and so on.
        """
        return run_sync(self.evaluate_async(tasks, name=name))

    async def evaluate_async(self, tasks: object = None, *, name: str | None = None) -> Evaluation:
        """The async twin of `evaluate`."""
        run = self._opened()
        known = {**run.evaluator.sets, **self._adhoc_sets}
        if tasks is None:
            name, given = _choose_set(known, name)
        else:
            given = load_given_tasks(tasks, env_key=self._env_key(run))
            name = name or _name_set(known, given)
            if name in known and list(known[name]) != given:
                raise ConfigError(
                    f"trainer.evaluate(name={name!r}): the run has a set of that name with other "
                    "tasks, which this would overwrite; choose another name"
                )
            if name not in known:
                self._adhoc_sets[name] = given
        # The first set of an evaluator is its main one; a set of its own comes last.
        evaluator = replace(run.evaluator, sets={**run.evaluator.sets, name: given})
        with run.console.progress(f"evaluate {name}", len(given) * evaluator.n_samples) as advance:
            report, _ = await evaluator.evaluate_set(name, given, run.state.step, advance)
        return Evaluation(report)

    def save(self) -> Path:
        """Save a checkpoint of the current step and return its folder."""
        saved = self._opened().save().folder
        return self._plan.shorten(Path(self._plan.config.trainer.ckpt_path) / saved.name)

    def __enter__(self) -> Trainer:
        with ExitStack() as signals:
            signals.enter_context(exit_after_saving())
            self._run_sync(self.__aenter__())
            self._signals = signals.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._signals:
            self._run_sync(self.__aexit__(kind, error, traceback))
            if isinstance(error, KeyboardInterrupt | SystemExit):
                open_stdout().write(f"Interrupted. {self._plan.describe_saved()}\n")

    def __iter__(self) -> Iterator[StepResult]:
        while (step := self._run_sync(self._next(), on_interrupt=SAVING)) is not None:
            yield step

    async def __aenter__(self) -> Trainer:
        from skyfleet.trainer.loops import train_steps
        from skyfleet.trainer.training_run import open_training_run

        directory = find_working_directory()  # it may have changed since __init__
        self._plan = replace(self._plan, directory=Path(directory or "/"))
        context = open_training_run(
            self._plan.config, given=self._plan.given, on_progress=self._plan.report_progress
        )
        self._run = await self._closing.enter_async_context(context)
        self._steps = train_steps(self._run)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        from skyfleet.trainer.training_run import conclude

        run, steps = self._opened(), self._steps
        self._run = self._steps = None
        try:
            if isinstance(steps, AsyncGenerator):
                await steps.aclose()
            # The caller's own code failed, Ctrl-C was pressed in it, or it left the loop.
            if not self._saved and error is not None:
                run.alerts.report_stop(error, run.state.step)
            if not self._saved and (error is not None or _has_unsaved_steps(run)):
                run.save()
            if error is None:
                self._outcome = conclude(run)
        finally:
            self._plan.callback_tasks.cancel()
            await self._closing.__aexit__(kind, error, traceback)

    async def __aiter__(self) -> AsyncIterator[StepResult]:
        while (step := await self._next()) is not None:
            yield step

    def __repr__(self) -> str:
        state = "closed" if self._run is None else f"step {self._run.state.step}"
        return f"Trainer({str(self.folder)!r}, {state})"

    async def _next(self) -> StepResult | None:
        """Train the next step; None after the last."""
        self._opened()
        assert self._steps is not None
        try:
            step = await anext(self._steps)
        except StopAsyncIteration:
            return None
        except BaseException:
            self._saved = True  # by the loop, at its last resume point
            raise
        await self._plan.settle_callbacks(self._opened())
        return wrap_step(step)

    def _run_sync(self, coroutine: Coroutine[Any, Any, T], *, on_interrupt: str | None = None) -> T:
        try:
            return run_sync(coroutine, on_interrupt=on_interrupt)
        except BackgroundLoopError as error:
            raise BackgroundLoopError(f"{error}. {self._plan.describe_saved()}") from None

    def _opened(self) -> core.Run:
        if self._run is None:
            raise ConfigError(
                "the trainer is not open; use it inside `with sf.Trainer(...) as trainer:`"
            )
        return self._run

    def _env_key(self, run: core.Run) -> str | None:
        return next(iter(sorted(run.evaluator.trained_envs)), None)


def _has_unsaved_steps(run: core.Run) -> bool:
    if run.state.step == run.first_step:
        return False
    saved = find_checkpoint(run.checkpoints, "latest")
    return saved is None or saved.step < run.state.step


def _choose_set(
    known: Mapping[str, Sequence[Task]], name: str | None
) -> tuple[str, Sequence[Task]]:
    if not known:
        raise ConfigError("trainer.evaluate(): no evaluation set; pass tasks")
    name = next(iter(known)) if name is None else name
    if name not in known:
        raise ConfigError(f"trainer.evaluate(name={name!r}): choose from {', '.join(known)}")
    return name, known[name]


def _name_set(known: Mapping[str, Sequence[Task]], tasks: Sequence[Task]) -> str:
    """The name that these tasks have already, or the first free one."""
    for name, others in known.items():
        if list(others) == tasks:
            return name
    names = ("adhoc" if n == 1 else f"adhoc_{n}" for n in count(1))
    return next(name for name in names if name not in known)
