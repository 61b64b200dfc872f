"""Turn the arguments of `train` and `Trainer` into a configuration and the objects beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from skyfleet.api.arguments import check_arguments
from skyfleet.api.background import CallbackTasks
from skyfleet.api.comparison import Evaluation
from skyfleet.api.config import TINY_DEFAULTS, ConfigLike, GivenConfig, read_config
from skyfleet.api.envs import ResolvedEnv, check_env_given, resolve_env
from skyfleet.api.models import ModelSource, resolve_model
from skyfleet.api.notebook import show_progress
from skyfleet.api.settings import (
    Algorithm,
    LoRA,
    Sampling,
    as_lora,
    check_algorithm,
    check_sampling,
)
from skyfleet.api.tasks import as_source, load_given_tasks, split
from skyfleet.api.trajectories import Trajectory, wrap_step
from skyfleet.config.root import RunConfig
from skyfleet.envs.context_env import with_context_tools
from skyfleet.errors import ConfigError, TaskError
from skyfleet.storage.working_directory import find_working_directory, shorten_path
from skyfleet.streams import open_stdout
from skyfleet.terminal import sanitize

if TYPE_CHECKING:
    from skyfleet.envs.env import EnvFactory
    from skyfleet.tasks.task import Task
    from skyfleet.trainer.assemble import GivenObjects
    from skyfleet.trainer.run import Run

SAVING = "saving a checkpoint; press Ctrl-C again to stop at once"
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
    """generator.eval_n_samples_per_prompt; several are sampled at temperature 1."""
    lr: float | None
    """trainer.policy.optimizer_config.lr."""
    batch_size: int | None
    """Tasks per step: trainer.train_batch_size, and one optimizer step per batch."""
    steps: int | None
    """trainer.max_training_steps."""
    eval_every: int | None
    """Steps; unset, before the first and after the last."""
    lora: LoRA | int | bool | None
    engine: str | None
    """auto, embedded, vllm, or the URL of a vLLM server: generator.backend."""
    trackers: Sequence[str] | str | None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """A call of `train` as configuration and objects."""

    config: RunConfig
    given: GivenObjects
    callback_tasks: CallbackTasks
    directory: Path
    """The working directory when the run starts, which an environment may change."""
    notes: Sequence[str] = ()

    @property
    def folder(self) -> Path:
        """The run folder, as it was given unless that leads elsewhere now."""
        return self.shorten(Path(self.config.trainer.run_path))

    def shorten(self, given: Path) -> Path:
        return shorten_path(self.directory / given, given)

    def describe_saved(self) -> str:
        """What an interrupted run has saved, and how to resume it."""
        from skyfleet.checkpoints.resume import find_checkpoint

        given = Path(self.config.trainer.ckpt_path)
        saved = find_checkpoint(self.directory / given, "latest")
        if saved is None:
            return f"{sanitize(str(self.folder))} has no checkpoint yet: the same call starts over."
        return (
            f"The last checkpoint is {sanitize(str(self.shorten(given / saved.folder.name)))}. To "
            f"resume, repeat the call with run_dir={sanitize(str(self.folder))!r}."
        )

    async def settle_callbacks(self, run: Run) -> None:
        """Wait for async callbacks in the caller's loop; one that returns STOP ends the run here."""
        from skyfleet.trainer.callbacks import STOP
        from skyfleet.trainer.loop import evaluate_step

        returned = await self.callback_tasks.settle()
        if STOP not in returned or run.callbacks.stop_requested:
            return
        run.callbacks.stop_requested = True
        # The step ended before it was known to be the last one.
        if run.schedule.eval_interval > 0 and run.state.step not in run.state.evaluated_steps:
            await evaluate_step(run, run.state.step)
            await self.callback_tasks.settle()
        run.save()

    def report_progress(self, line: str) -> None:
        stdout = open_stdout()
        stdout.write(f"setting up: {sanitize(line)}\n")
        stdout.flush()


def plan_training(
    where: str, model: object, env: object, arguments: TrainArguments
) -> TrainingPlan:
    """Turn the arguments into a configuration and the objects it cannot hold."""
    check_arguments(where, arguments, TrainArguments)
    given = read_config(arguments.get("config"))
    if model is None and given.base is None:
        raise ConfigError(f"{where}(model=...): model is missing; pass a name, a folder or 'tiny'")
    run_dir = arguments.get("run_dir")
    _check_run_dir(where, run_dir)
    resolved = resolve_env(
        env,
        arguments.get("reward"),
        where=where,
        default_name=Path(run_dir).name if run_dir is not None else None,
    )
    source = (
        None if model is None else resolve_model(model, arguments.get("tokenizer"), where=where)
    )
    keys = _model_keys(source, given) | dict(resolved.overrides) | _setting_keys(where, arguments)
    is_own = any(arguments.get(name) is not None for name in ("tasks", "reward"))
    is_own = is_own or model is not None or env is not None
    keys |= _eval_temperature_keys(arguments, given)
    keys |= _run_keys(run_dir, source, given, is_own=is_own)
    train_tasks, eval_sets, notes = _choose_tasks(where, arguments, resolved, given)
    keys |= _task_keys(arguments, train_tasks, eval_sets, given)
    config = given.build(keys)
    if resolved.open_env is None:
        check_env_given(where, config, chain(train_tasks or (), *(eval_sets or {}).values()))
    # Imported here, because it takes seconds and a mistake in the call needs none of it.
    from skyfleet.trainer.assemble import GivenObjects
    from skyfleet.trainer.callbacks import Callbacks

    tasks = CallbackTasks()
    callbacks = Callbacks(
        on_episode=_wrapped(tasks, arguments.get("on_episode"), Trajectory.from_record),
        on_step=show_progress(
            _wrapped(tasks, arguments.get("on_step"), wrap_step),
            total_steps=config.trainer.max_training_steps,
        ),
        on_evaluation=_wrapped(tasks, arguments.get("on_evaluation"), Evaluation),
    )
    objects = GivenObjects(
        open_env=_with_context_tools(resolved.open_env, config),
        train_tasks=train_tasks,
        eval_sets=eval_sets,
        model=source.loaded if source is not None else None,
        callbacks=callbacks,
    )
    return TrainingPlan(
        config=config,
        given=objects,
        callback_tasks=tasks,
        notes=notes,
        directory=Path(find_working_directory() or "/"),
    )


def _check_run_dir(where: str, run_dir: object) -> None:
    if run_dir is None:
        return
    problem = ""
    if not isinstance(run_dir, str | Path) or not str(run_dir):
        problem = "pass the path of a folder"
    elif "\0" in str(run_dir):
        problem = "a path has no NUL character; choose another"
    elif (path := Path(run_dir)).exists() and not path.is_dir():
        problem = "this is a file; pass the path of a folder"
    if problem:
        raise ConfigError(f"{where}(run_dir={str(run_dir)!r:.80}): {problem}")


def _with_context_tools(open_env: EnvFactory | None, config: RunConfig) -> EnvFactory | None:
    environment = config.environment
    if open_env is None or not environment.enable_context_tools:
        return open_env
    return with_context_tools(open_env, max_output_chars=environment.max_output_chars)


def _model_keys(source: ModelSource | None, given: GivenConfig) -> dict[str, Any]:
    if source is None:
        return {}
    if source.url is not None:
        raise ConfigError(
            f"sf.train(model={source.url!r}): a server is trained with engine=its URL"
        )
    path = source.path or source.name or "given"
    keys: dict[str, Any] = {"trainer.policy.model.path": path}
    dimensions = "trainer.policy.model_config_kwargs"
    if source.folder is not None:
        keys[dimensions] = {}
    elif given.base is not None and given.load_base().trainer.policy.model.path != path:
        # Those of the base are the dimensions of another model.
        keys[dimensions] = TINY_DEFAULTS[dimensions] if path == "tiny" else {}
    return keys


def _setting_keys(where: str, arguments: TrainArguments) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    algorithm, lora = arguments.get("algorithm"), as_lora(where, arguments.get("lora"))
    check_algorithm(where, algorithm)
    if isinstance(algorithm, str):
        keys["trainer.algorithm.advantage_estimator"] = algorithm
    elif algorithm is not None:
        keys |= algorithm.overrides()
    if lora is not None:
        keys |= lora.overrides()
    check_sampling(where, "sampling", sampling := arguments.get("sampling"))
    keys |= sampling.overrides() if sampling is not None else {}
    check_sampling(where, "eval_sampling", sampling := arguments.get("eval_sampling"))
    keys |= sampling.overrides("generator.eval_sampling_params") if sampling is not None else {}
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
        keys["trainer.logger"] = [trackers] if isinstance(trackers, str) else list(trackers)
    return keys | {key: value for key, value in named.items() if value is not None}


def _eval_temperature_keys(arguments: TrainArguments, given: GivenConfig) -> dict[str, Any]:
    """Several attempts are sampled at temperature 1, because greedy ones are all the same."""
    attempts, sampling = arguments.get("eval_attempts"), arguments.get("eval_sampling")
    if attempts is None or attempts < 2 or (sampling and sampling.temperature is not None):
        return {}
    if given.base is not None and given.load_base().generator.eval_sampling_params.temperature:
        return {}
    return {"generator.eval_sampling_params.temperature": 1.0}


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
    run_dir: str | Path | None, source: ModelSource | None, given: GivenConfig, *, is_own: bool
) -> dict[str, Any]:
    """The run folder. A base alone keeps its own, so that the same call resumes the run."""
    is_new = run_dir is None
    if run_dir is None:
        if (given.base is not None and not is_own) or _names_folder(given):
            return {}
        name = Path(source.name or "model").name if source is not None else "run"
        run_dir = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    keys = {"trainer.run_path": str(run_dir), "trainer.run_name": Path(run_dir).name}
    if given.base is not None:
        # A saved configuration names the folders of its own run, whose checkpoints would be resumed.
        trainer = given.load_base().trainer
        for key, folder in (("ckpt_path", "checkpoints"), ("export_path", "exports")):
            if is_new or Path(getattr(trainer, key)).is_relative_to(trainer.run_path):
                keys[f"trainer.{key}"] = str(Path(run_dir) / folder)
    return keys


def _names_folder(given: GivenConfig) -> bool:
    return bool({"trainer.run_name", "trainer.run_path"} & given.keys.keys())


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
    # The sets of a base belong to its own environment and tasks.
    if train_tasks is None or any(key.startswith("data.val_data") for key in given.keys):
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
) -> dict[str, Any]:
    """Keys that follow from the tasks: their source, enough epochs, and when to evaluate."""
    found: dict[str, Any] = {}
    source = as_source(arguments.get("tasks"))
    if source is not None or (given.base is not None and arguments.get("tasks") is not None):
        found["data.train_data"] = [source] if source is not None else []
    steps = arguments.get("steps")
    if steps is not None:
        # Enough whatever the batch size and the tasks that are dropped: an epoch is at least a step.
        found["trainer.epochs"] = max(1, steps)
    if train_tasks is None:
        return found
    if given.base is not None and eval_sets is not None:
        found["data.val_data"] = []
    if arguments.get("eval_every") is None and given.base is None:
        # Before the first step and after the last.
        found["trainer.eval_interval"] = steps or 1_000_000
    if not any(task.solution for task in train_tasks):
        found["trainer.warm_start.steps"] = 0
    return found


def _wrapped(
    tasks: CallbackTasks, callback: Callable[..., Any] | None, wrap: Callable[[Any], Any]
) -> Callable[..., Any] | None:
    if callback is None:
        return None
    call = tasks.wrap(callback)
    return lambda value: call(wrap(value))
