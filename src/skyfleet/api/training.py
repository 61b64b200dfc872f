"""Train a policy: arguments to a configuration and objects, a run, and its result."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from skyfleet.api.background import as_sync_callback, run_sync
from skyfleet.api.comparison import Comparison, Evaluation
from skyfleet.api.config import ConfigLike, GivenConfig, read_config
from skyfleet.api.envs import ResolvedEnv, resolve_env
from skyfleet.api.models import ModelSource, resolve_model
from skyfleet.api.policy import Policy
from skyfleet.api.runs import Run, load_run
from skyfleet.api.settings import Algorithm, LoRA, Sampling
from skyfleet.api.tables import Table
from skyfleet.api.tasks import as_source, load_given_tasks, split
from skyfleet.api.trajectories import Trajectory, wrap_step
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError, TaskError

if TYPE_CHECKING:
    from typing import Unpack

    from skyfleet.tasks.task import Task
    from skyfleet.trainer.assemble import GivenObjects
    from skyfleet.trainer.training_run import TrainingOutcome

HELD_OUT = "held_out"
"""The evaluation set that is split off if none is given."""


class TrainArguments(TypedDict, total=False):
    """The keyword arguments of `train`, `train_async` and `Trainer`."""

    tasks: object
    """What to train on; see docs/python_api.md for the kinds."""
    eval: object
    """Evaluation tasks, or a dict of named sets. Unset, a tenth is held out; False evaluates nothing."""
    reward: Callable[..., Any] | None
    """For single-turn tasks without an environment."""
    algorithm: Algorithm | str | None
    sampling: Sampling | None
    eval_sampling: Sampling | None
    eval_attempts: int | None
    """generator.eval_n_samples_per_prompt."""
    lr: float | None
    """trainer.policy.optimizer_config.lr."""
    batch_size: int | None
    """Tasks per step: trainer.train_batch_size, and one optimizer step per batch."""
    steps: int | None
    """trainer.max_training_steps."""
    eval_every: int | None
    """Steps; unset, before the first and after the last."""
    lora: LoRA | int | None
    engine: str | None
    """auto, embedded, vllm, or the URL of a vLLM server: generator.backend."""
    trackers: Sequence[str] | None
    """wandb, tensorboard: trainer.logger."""
    seed: int | None
    run_dir: str | Path | None
    """trainer.run_path; unset, a new folder under runs/."""
    tokenizer: Any
    """For a loaded transformers model that does not say where its tokenizer is."""
    config: ConfigLike
    """Any other keys, a YAML path or preset to start from, or a list of these."""
    on_episode: Callable[[Trajectory], Any] | None
    on_step: Callable[..., Any] | None
    on_evaluation: Callable[[Evaluation], Any] | None


def train(
    model: object = None, env: object = None, **arguments: Unpack[TrainArguments]
) -> TrainResult:
    """Train a model on tasks in an environment, or with `reward=` alone on single-turn tasks.

    `model` is a Hugging Face name, a folder, "tiny", a loaded transformers model, or an earlier
    policy. Every argument sets a configuration key; `config={"key": value}` sets any other.
    Callbacks `on_episode(trajectory)`, `on_step(step)` and `on_evaluation(evaluation)` may return
    `sf.STOP`. Ctrl-C saves a checkpoint and returns a partial result.

    >>> import skyfleet as sf
    >>> def short(answer):
    ...     return float(len(answer) < 10)
    >>> tasks = [{"prompt": f"Say the number {n}."} for n in range(4)]
    >>> result = sf.train("tiny", reward=short, tasks=tasks, eval=False, steps=1, batch_size=2,
    ...                   algorithm=sf.GRPO(group_size=2, kl=0), sampling=sf.Sampling(max_tokens=4))
    >>> result.step
    1
    """
    return run_sync(_train("sf.train", model, env, arguments, partial_on_cancel=True))


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
    where: str, model: object, env: object, arguments: TrainArguments, *, partial_on_cancel: bool
) -> TrainResult:
    from skyfleet.trainer.training_run import run_training

    plan = plan_training(where, model, env, arguments)
    try:
        outcome = await run_training(
            plan.config, given=plan.given, on_progress=plan.report_progress
        )
    except asyncio.CancelledError:
        folder = Path(plan.config.trainer.run_path)
        if not partial_on_cancel or not (folder / "config.yaml").is_file():
            raise
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        return TrainResult(folder, notes=plan.notes, interrupted=True)
    return TrainResult(outcome.folder, outcome=outcome, notes=plan.notes)


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
        self.folder, self.interrupted = folder, interrupted
        self._outcome, self._notes = outcome, tuple(notes)
        self._policy: Policy | None = None

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
        """The best of the evaluated steps; None for an interrupted run."""
        return self._outcome.best_step if self._outcome is not None else None

    @property
    def comparison(self) -> Comparison:
        """Every evaluation set before training and after it, with a verdict."""
        compared = self.run.comparison
        stopped = f"Interrupted after step {self.step}; the run can be resumed."
        return Comparison(
            compared.sets, [*compared.notes, *self._notes, *([stopped] if self.interrupted else [])]
        )

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
    def source(self) -> ModelSource:
        return self.policy.source

    def __repr__(self) -> str:
        state = "interrupted" if self.interrupted else "finished"
        return f"TrainResult({str(self.folder)!r}, {state} at step {self.step})"

    def __str__(self) -> str:
        return f"{self!r}\n{self.comparison}"

    def _repr_html_(self) -> str:
        return self.run._repr_html_() if not self.interrupted else f"<p>{self!r}</p>"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """A call of `train` as configuration and objects."""

    config: RunConfig
    given: GivenObjects
    notes: Sequence[str] = field(default=())

    def report_progress(self, line: str) -> None:
        sys.stdout.write(f"setting up: {line}\n")


def plan_training(
    where: str, model: object, env: object, arguments: TrainArguments
) -> TrainingPlan:
    """Turn the arguments into a configuration and the objects it cannot hold."""
    if unknown := sorted(arguments.keys() - TrainArguments.__annotations__.keys()):
        raise ConfigError(
            f"{where}({unknown[0]}=...) is no argument; pass a configuration key as "
            f'config={{"...": ...}}, or one of {", ".join(TrainArguments.__annotations__)}'
        )
    from skyfleet.trainer.assemble import GivenObjects
    from skyfleet.trainer.callbacks import Callbacks

    given = read_config(arguments.get("config"))
    if model is None and given.base is None:
        raise ConfigError(f"{where}(model=...): model is missing; pass a name, a folder or 'tiny'")
    run_dir = arguments.get("run_dir")
    resolved = resolve_env(
        env,
        arguments.get("reward"),
        where=where,
        default_name=Path(run_dir).name if run_dir is not None else None,
    )
    source = (
        None if model is None else resolve_model(model, arguments.get("tokenizer"), where=where)
    )
    keys = _model_keys(source) | dict(resolved.overrides) | _setting_keys(arguments)
    keys |= _run_keys(run_dir, source, given)
    train_tasks, eval_sets, notes = _choose_tasks(where, arguments, resolved, given)
    keys |= _task_keys(arguments, train_tasks, eval_sets, given, keys)
    callbacks = Callbacks(
        on_episode=_wrapped(arguments.get("on_episode"), Trajectory.from_record),
        on_step=_wrapped(arguments.get("on_step"), wrap_step),
        on_evaluation=_wrapped(arguments.get("on_evaluation"), Evaluation),
    )
    objects = GivenObjects(
        open_env=resolved.open_env,
        train_tasks=train_tasks,
        eval_sets=eval_sets,
        model=source.loaded if source is not None else None,
        callbacks=callbacks,
    )
    return TrainingPlan(config=given.build(keys), given=objects, notes=notes)


def _model_keys(source: ModelSource | None) -> dict[str, Any]:
    if source is None:
        return {}
    if source.url is not None:
        raise ConfigError(
            f"sf.train(model={source.url!r}): a server is trained with engine=its URL"
        )
    path = source.path or source.name or "given"
    keys: dict[str, Any] = {"trainer.policy.model.path": path}
    if source.folder is not None:
        keys["trainer.policy.model_config_kwargs"] = {}
    return keys


def _setting_keys(arguments: TrainArguments) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    algorithm, lora = arguments.get("algorithm"), arguments.get("lora")
    if isinstance(algorithm, str):
        keys["trainer.algorithm.advantage_estimator"] = algorithm
    elif algorithm is not None:
        keys |= algorithm.overrides()
    if lora is not None:
        keys |= (LoRA(rank=lora) if isinstance(lora, int) else lora).overrides()
    if (sampling := arguments.get("sampling")) is not None:
        keys |= sampling.overrides()
    if (sampling := arguments.get("eval_sampling")) is not None:
        keys |= sampling.overrides("generator.eval_sampling_params")
    keys |= _engine_keys(arguments.get("engine"))
    batch_size = arguments.get("batch_size")
    named = {
        "trainer.policy.optimizer_config.lr": arguments.get("lr"),
        "trainer.train_batch_size": batch_size,
        "trainer.policy_mini_batch_size": batch_size,
        "trainer.max_training_steps": arguments.get("steps"),
        "trainer.eval_interval": arguments.get("eval_every"),
        "trainer.seed": arguments.get("seed"),
        "generator.eval_n_samples_per_prompt": arguments.get("eval_attempts"),
    }
    if (trackers := arguments.get("trackers")) is not None:
        keys["trainer.logger"] = list(trackers)
    return keys | {key: value for key, value in named.items() if value is not None}


def _engine_keys(engine: str | None) -> dict[str, Any]:
    if engine is None or engine == "auto":
        return {}
    if engine.startswith(("http://", "https://")):
        return {
            "generator.backend": "vllm",
            "generator.run_engines_locally": False,
            "generator.remote_inference_engine_urls": [engine],
        }
    return {"generator.backend": engine}


def _run_keys(
    run_dir: str | Path | None, source: ModelSource | None, given: GivenConfig
) -> dict[str, Any]:
    if run_dir is None:
        if given.base is not None or "trainer.run_name" in given.keys:
            return {}
        name = Path(source.name or "model").name if source is not None else "run"
        run_dir = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    return {"trainer.run_path": str(run_dir), "trainer.run_name": Path(run_dir).name}


def _choose_tasks(
    where: str, arguments: TrainArguments, env: ResolvedEnv, given: GivenConfig
) -> tuple[list[Task] | None, dict[str, list[Task]] | None, list[str]]:
    """Training tasks and evaluation sets as objects; None leaves those of the configuration."""
    tasks, evaluation = arguments.get("tasks"), arguments.get("eval")
    source = tasks if tasks is not None else env.tasks
    if source is None:
        if given.base is None and "data.train_data" not in given.keys:
            raise ConfigError(
                f"{where}(tasks=...): tasks is missing; pass a list of dicts or a path"
            )
        train_tasks = None
    else:
        train_tasks = load_given_tasks(source, env_key=env.env_key)
    if evaluation is False:
        return train_tasks, {}, []
    if evaluation is not None:
        sets = evaluation if isinstance(evaluation, Mapping) else {"val": evaluation}
        loaded = {
            str(name): load_given_tasks(held, env_key=env.env_key) for name, held in sets.items()
        }
        return train_tasks, loaded, []
    configured = given.base is not None or any(
        key.startswith("data.val_data") for key in given.keys
    )
    if train_tasks is None or configured:
        return train_tasks, None, []
    try:
        train_tasks, held_out = split(train_tasks)
    except TaskError:
        note = "Fewer than 50 tasks: none were held out; pass eval=tasks to measure the result."
        return train_tasks, {}, [note]
    return train_tasks, {HELD_OUT: held_out}, []


def _task_keys(
    arguments: TrainArguments,
    train_tasks: Sequence[Task] | None,
    eval_sets: Mapping[str, Sequence[Task]] | None,
    given: GivenConfig,
    keys: Mapping[str, Any],
) -> dict[str, Any]:
    """Keys that follow from the tasks: their source, enough epochs, and when to evaluate."""
    found: dict[str, Any] = {}
    if (source := as_source(arguments.get("tasks"))) is not None:
        found["data.train_data"] = [source]
    steps = arguments.get("steps")
    if train_tasks is None:
        return found
    if given.base is not None and eval_sets is not None:
        found["data.val_data"] = []
    batch = int({"trainer.train_batch_size": 4, **keys, **given.keys}["trainer.train_batch_size"])
    if steps is not None:
        found["trainer.epochs"] = max(1, ceil(steps / max(1, len(train_tasks) // batch)))
    if arguments.get("eval_every") is None and given.base is None:
        # Before the first step and after the last.
        found["trainer.eval_interval"] = steps or 1_000_000
    if not any(task.solution for task in train_tasks):
        found["trainer.warm_start.steps"] = 0
    return found


def _wrapped(
    callback: Callable[..., Any] | None, wrap: Callable[[Any], Any]
) -> Callable[..., Any] | None:
    if callback is None:
        return None
    call = as_sync_callback(callback)
    return lambda value: call(wrap(value))
