"""Train a policy: arguments to a configuration and objects, a run, and its result."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skyfleet.api.arguments import show_arguments
from skyfleet.api.background import BackgroundLoopError, run_sync
from skyfleet.api.comparison import Comparison
from skyfleet.api.models import ModelSource, find_best_step
from skyfleet.api.policy import Policy
from skyfleet.api.runs import Run, load_run
from skyfleet.api.tables import Table
from skyfleet.api.terminating import exit_after_saving
from skyfleet.api.train_plan import SAVING, TrainArguments, TrainingPlan, plan_training
from skyfleet.errors import require_torch
from skyfleet.storage.working_directory import shorten_path
from skyfleet.streams import open_stdout
from skyfleet.terminal import sanitize

if TYPE_CHECKING:
    from typing import Unpack

    from skyfleet.trainer.training_run import TrainingOutcome


@show_arguments(TrainArguments)
def train(
    model: object = None, env: object = None, **arguments: Unpack[TrainArguments]
) -> TrainResult:
    """Train a model on tasks in an environment, or with `reward=` alone on single-turn tasks.

    model: a Hugging Face name, a folder, "tiny", a loaded transformers model (with `tokenizer` if it
        does not say where its own is), or an earlier policy.
    env: a `ToolEnv`, an `Env` class or instance, a function from a task to one, or a name; or
        `reward`, a function of task, answer, messages and trajectory.
    tasks: dicts with a `prompt`, `Task`s, a data frame, a dataset, a path or a source.
    eval: tasks, or a dict of named sets; unset, a tenth of the tasks is held out; False for none.
    algorithm, sampling, eval_sampling, lora: `sf.GRPO(...)`, `sf.Sampling(...)`, `sf.LoRA(...)`.
    lr, batch_size, steps, eval_every, eval_attempts, seed: numbers; batch_size counts tasks.
    engine: "auto", "embedded", "vllm", or the URL of a vLLM server to train.
    trackers: names such as "wandb" and "tensorboard".
    run_dir: the run folder, which is resumed if it holds a checkpoint; unset, a new one.
    config: any other keys, a YAML path or a preset to start from, or a list of these.
    on_episode, on_step, on_evaluation: callbacks; one that returns `sf.STOP` ends the run.

    An argument that is left out or None has its default:

        tasks           the environment's own, if it has any
        eval            a tenth of at least 50 tasks
        algorithm       GRPO, 4 attempts per task, KL 0.001
        sampling        temperature 1, 1,024 tokens per turn ("tiny": 64)
        eval_sampling   greedy; temperature 1 if eval_attempts is above 1
        eval_attempts   1
        lr              1e-6 ("tiny": 3e-4)
        batch_size      4 tasks
        steps           20 epochs
        eval_every      before the first step and after the last
        lora            every weight is trained
        engine          embedded
        trackers        the console and metrics.jsonl
        seed            42
        run_dir         a new folder under runs/

    Every argument sets configuration keys, which docs/python_api.md lists. Ctrl-C saves a
    checkpoint and returns a partial result; SIGTERM and SIGHUP save one and exit.

    >>> import skyfleet as sf
    >>> def short(answer):
    ...     return float(len(answer) < 10)
    >>> tasks = [{"prompt": f"Say the number {n}."} for n in range(4)]
    >>> result = sf.train("tiny", reward=short, tasks=tasks, eval=False, steps=1, batch_size=2,
    ...                   algorithm=sf.GRPO(group_size=2, kl=0), sampling=sf.Sampling(max_tokens=4))
    >>> result.step
    1
    """
    plans: list[TrainingPlan] = []
    training = _train("sf.train", model, env, arguments, partial_on_cancel=True, plans=plans)
    try:
        with exit_after_saving():
            result = run_sync(training, on_interrupt=SAVING)
    except BackgroundLoopError as error:
        saved = plans[0].describe_saved() if plans else "Nothing was saved yet."
        raise BackgroundLoopError(f"{error}. {saved}") from None
    if result.interrupted:
        return result
    open_stdout().write(f"The run is in {sanitize(str(result.folder))}.\n")
    return result


@show_arguments(TrainArguments)
async def train_async(
    model: object = None, env: object = None, **arguments: Unpack[TrainArguments]
) -> TrainResult:
    """The async twin of `train`, in the caller's event loop. Cancelling it saves a checkpoint.

    >>> import asyncio, skyfleet as sf
    >>> tasks = [{"prompt": f"Say the number {n}."} for n in range(2)]
    >>> result = asyncio.run(sf.train_async(
    ...     "tiny", reward=lambda answer: 0.0, tasks=tasks, eval=False, steps=1, batch_size=2,
    ...     algorithm=sf.GRPO(group_size=2, kl=0), sampling=sf.Sampling(max_tokens=4)))
    >>> result.interrupted
    False
    """
    return await _train("sf.train_async", model, env, arguments, partial_on_cancel=False)


async def _train(
    where: str,
    model: object,
    env: object,
    arguments: TrainArguments,
    *,
    partial_on_cancel: bool,
    plans: list[TrainingPlan] | None = None,
) -> TrainResult:
    """The plan is also appended to `plans`."""
    require_torch()
    plan = plan_training(where, model, env, arguments)
    if plans is not None:
        plans.append(plan)
    try:
        outcome = await _run_training(plan, arguments)
    except asyncio.CancelledError:
        folder = plan.folder
        if not partial_on_cancel or not (folder / "config.yaml").is_file():
            raise
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        open_stdout().write(f"Interrupted. {plan.describe_saved()}\n")
        return TrainResult(folder, notes=plan.notes, interrupted=True)
    return TrainResult(plan.folder, outcome=outcome, notes=plan.notes)


async def _run_training(plan: TrainingPlan, arguments: TrainArguments) -> TrainingOutcome:
    from skyfleet.trainer.training_run import run_training

    callbacks = ("on_episode", "on_step", "on_evaluation")
    if any(arguments.get(name) is not None for name in callbacks):
        return await _run_with_callbacks(plan)
    return await run_training(plan.config, given=plan.given, on_progress=plan.report_progress)


async def _run_with_callbacks(plan: TrainingPlan) -> TrainingOutcome:
    """`run_training`, which also awaits what async callbacks return after each step."""
    from skyfleet.trainer.loops import train_steps
    from skyfleet.trainer.training_run import conclude, open_training_run

    context = open_training_run(plan.config, given=plan.given, on_progress=plan.report_progress)
    try:
        async with context as run:
            async for _ in train_steps(run):
                try:
                    await plan.settle_callbacks(run)
                except BaseException as error:
                    run.alerts.report_stop(error, run.state.step)
                    run.save()
                    raise
            return conclude(run)
    finally:
        plan.callback_tasks.cancel()


class TrainResult:
    """What a run ended with: comparison, metrics, policy and the run folder.

    >>> import skyfleet as sf
    >>> tasks = [{"prompt": f"Say the number {n}."} for n in range(2)]
    >>> result = sf.train("tiny", reward=lambda answer: 0.0, tasks=tasks, eval=False, steps=1,
    ...                   batch_size=2, algorithm=sf.GRPO(group_size=2, kl=0),
    ...                   sampling=sf.Sampling(max_tokens=4))
    >>> result.metrics["reward/avg_raw_reward"]
    [None, 0.0]
    """

    def __init__(
        self,
        folder: Path,
        *,
        outcome: TrainingOutcome | None = None,
        notes: Sequence[str] = (),
        interrupted: bool = False,
    ) -> None:
        self._given_folder, self._folder = folder, folder.absolute()
        self.interrupted = interrupted
        self._outcome, self._notes = outcome, tuple(notes)
        self._policy: Policy | None = None

    @property
    def folder(self) -> Path:
        """The run folder, as it was given unless the working directory has changed."""
        return shorten_path(self._folder, self._given_folder)

    @property
    def run(self) -> Run:
        """The run folder: trajectories, reports, checkpoints."""
        return load_run(self.folder)

    @property
    def step(self) -> int:
        """The last step that was trained."""
        if self._outcome is not None:
            return self._outcome.step
        rows = self.metrics
        return int(rows["step"][-1]) if len(rows) else 0

    @property
    def best_step(self) -> int | None:
        """The best of the evaluated steps; None for an interrupted run or one without any."""
        return find_best_step(self.folder) if self._outcome is not None else None

    @property
    def comparison(self) -> Comparison:
        """Every evaluation set before training and after it, with a verdict."""
        from skyfleet.evaluation.model_selection import describe_best_step

        compared = self.run.comparison
        notes = [*compared.notes, *self._notes]
        if self.interrupted:
            notes.append(
                f"Interrupted after step {self.step}; the run can be resumed by the same call with "
                f"run_dir={str(self.folder)!r}."
            )
        elif compared.sets and self.best_step is not None:
            notes.append(describe_best_step(compared.sets[0].name, self.best_step))
        return Comparison(compared.sets, notes)

    @property
    def table(self) -> str | None:
        """The verdict table in Markdown, as in results.md; None if there is none yet."""
        return self._outcome.table if self._outcome is not None else None

    @property
    def metrics(self) -> Table:
        """One row per step."""
        return self.run.metrics

    @property
    def policy(self) -> Policy:
        """The policy of the last checkpoint."""
        if self._policy is None:
            self._policy = self.run.policy()
        return self._policy

    @property
    def run_folder(self) -> Path:
        return self.folder

    @property
    def source(self) -> ModelSource:
        return self.policy.source

    def __repr__(self) -> str:
        state = "interrupted" if self.interrupted else "finished"
        return f"TrainResult({str(self.folder)!r}, {state} at step {self.step})"

    def __str__(self) -> str:
        return f"{self!r}\n{self.comparison}"

    def _repr_html_(self) -> str:
        return self.run._repr_html_() if not self.interrupted else f"<p>{self!r}</p>"
