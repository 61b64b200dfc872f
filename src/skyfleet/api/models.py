"""What `model=` may be: a name, a folder, a run, a URL, a loaded model, or a policy."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from skyfleet.config.loading import load_recorded_config
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError

if TYPE_CHECKING:
    from skyfleet.models.loading import LoadedModel

_BUILT_IN = ("tiny", "smollm2")
"""Models that need no download from a hub."""
SCRIPTED = ("oracle", "null", "random")
"""Agents that need no model: the reference solution, one that does nothing, one at random."""


@runtime_checkable
class HasRunFolder(Protocol):
    """A run or its result."""

    @property
    def run_folder(self) -> Path: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where weights come from; exactly one of path, url and loaded."""

    path: str | None = None
    folder: Path | None = None
    """The folder of saved weights; None for a model that is loaded by name."""
    url: str | None = None
    loaded: LoadedModel | None = None
    run_config: RunConfig | None = None
    """The configuration of the run that trained them, if one did."""
    step: int = 0
    """The training step of that run."""

    @property
    def name(self) -> str:
        if self.loaded is not None:
            return _name_module(self.loaded.module)
        return self.url or str(self.path)


def resolve_model(model: Any, tokenizer: Any = None, *, where: str) -> ModelSource:
    """`where` is the call in error messages, such as `sf.train`."""
    source = getattr(model, "source", model)
    if isinstance(source, ModelSource):
        return source
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise ConfigError(f"{where}(tokenizer=...): {str(model)!r} has its own; leave it out")
        return _resolve_path(str(model), where)
    if isinstance(model, tuple) and len(model) == 2:
        model, tokenizer = model
    if hasattr(model, "state_dict") and hasattr(model, "config"):
        return ModelSource(loaded=_loaded(model, tokenizer, where))
    raise ConfigError(
        f"{where}(model={model!r:.80}): pass a Hugging Face name, a folder, a run, a URL, a "
        "transformers model, or a policy"
    )


def find_run_policy(run: Path, step: int | str = "last") -> ModelSource:
    """The policy of a run's checkpoint: a step, "last" or "best"."""
    config = load_recorded_config(run / "config.yaml")
    steps = list_checkpoints(Path(config.trainer.ckpt_path), run)
    if not steps:
        raise ConfigError(f"{run} has no checkpoint yet; train it first")
    chosen = max(steps) if step == "last" else find_best_step(run) if step == "best" else step
    if chosen is None:
        raise ConfigError(f"{run} was never evaluated, so no step is its best; choose 'last'")
    if chosen not in steps:
        raise ConfigError(f"{run} has no checkpoint of step {chosen}; choose from {sorted(steps)}")
    folder = steps[int(chosen)] / "policy"
    return ModelSource(path=str(folder), folder=folder, run_config=config, step=int(chosen))


def list_checkpoints(configured: Path, run: Path) -> dict[int, Path]:
    """By step. A run folder that was moved has its checkpoints inside it."""
    folder = configured if configured.is_dir() else run / "checkpoints"
    numbered = ((p.name.removeprefix("global_step_"), p) for p in folder.glob("global_step_*"))
    return {int(n): path for n, path in numbered if n.isdecimal() and (path / "policy").is_dir()}


def find_best_step(run: Path) -> int | None:
    """The best of a run's evaluated steps; None if it was not evaluated."""
    from skyfleet.analysis.run_folder import open_run

    found = [
        row["trainer/best_step"] for row in open_run(run).metrics() if "trainer/best_step" in row
    ]
    return int(found[-1]) if found else None


def _resolve_path(given: str, where: str) -> ModelSource:
    if given.startswith(("http://", "https://")):
        return ModelSource(url=given)
    path = Path(given).expanduser()
    if (path / "config.yaml").is_file():
        return find_run_policy(path)
    if (path / "policy" / "config.json").is_file():
        path = path / "policy"
    run = path.parent.parent.parent
    number = path.parent.name.removeprefix("global_step_")
    if path.name == "policy" and number.isdecimal() and (run / "config.yaml").is_file():
        config = load_recorded_config(run / "config.yaml")
        return ModelSource(path=str(path), folder=path, run_config=config, step=int(number))
    folder = path if (path / "config.json").is_file() else None
    if folder is None and given not in _BUILT_IN:
        _check_name(given, path, where)
    return ModelSource(path=str(path) if path.is_dir() else given, folder=folder)


def _check_name(given: str, path: Path, where: str) -> None:
    """ConfigError for a mistyped path or name, which would be asked for on the Hugging Face hub."""
    call = f"{where}(model={given!r})"
    if path.is_dir():
        raise ConfigError(f"{call}: the folder holds no model and no run; name one that does")
    if given in SCRIPTED:
        raise ConfigError(
            f"{call}: a scripted agent only plays: sf.evaluate({given!r}, env, tasks)"
        )
    near = get_close_matches(given, [*_BUILT_IN, *SCRIPTED], n=1, cutoff=0.75)
    if near:
        raise ConfigError(f"{call}: no such model; did you mean {near[0]!r}?")
    is_local = given.startswith((".", "~")) or path.is_absolute()
    is_local = is_local or (len(path.parts) > 2 and Path(path.parts[0]).is_dir())
    folders = [p for p in path.parent.glob("*") if p.is_dir()] if len(path.parts) > 1 else []
    close = get_close_matches(path.name, [p.name for p in folders], n=1)
    # A name on the hub has two parts too, and a folder may be named like an organisation there.
    if is_local or (close and (path.parent / close[0] / "config.yaml").is_file()):
        hint = f"did you mean {str(path.parent / close[0])!r}?" if close else "check the path"
        raise ConfigError(f"{call}: no such folder; {hint}")


def _loaded(module: Any, tokenizer: Any, where: str) -> LoadedModel:
    from skyfleet.models.loading import LoadedModel, load_tokenizer

    name = _name_module(module)
    if tokenizer is None and not name:
        raise ConfigError(
            f"{where}(model=...): the loaded model does not say where its tokenizer is; pass "
            "tokenizer="
        )
    return LoadedModel(module=module, tokenizer=tokenizer or load_tokenizer(name))


def _name_module(module: Any) -> str:
    return str(getattr(module.config, "_name_or_path", "") or "")
