"""Policy: a model that generates, plays episodes, is saved, pushed and served."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyfleet.api.background import run_sync
from skyfleet.api.config import ConfigLike
from skyfleet.api.evaluation import rollout
from skyfleet.api.inference import PolicyEngine, inference_config, open_no_env
from skyfleet.api.models import HasRunFolder, find_run_policy, resolve_model
from skyfleet.api.serving import Server, serve
from skyfleet.api.settings import Sampling
from skyfleet.api.trajectories import Trajectory
from skyfleet.chat.message import Message
from skyfleet.errors import ConfigError

if TYPE_CHECKING:
    from skyfleet.envs.python_episode import MessageLike
    from skyfleet.models.loading import LoadedModel
    from skyfleet.tasks.task import Task


class Policy(PolicyEngine):
    """A model ready for inference. Its engine starts with the first call and stays until `close`.

    >>> import skyfleet as sf
    >>> policy = sf.load_policy("tiny")
    >>> policy
    Policy('tiny')
    """

    def generate(
        self,
        messages: MessageLike | Sequence[MessageLike],
        *,
        tools: Sequence[Callable[..., Any]] = (),
        sampling: Sampling | None = None,
    ) -> Message:
        """The model's next message after these; `tools` are functions, which are not called."""
        return run_sync(self.generate_async(messages, tools=tools, sampling=sampling))

    def rollout(
        self, env: object, task: Task | Mapping[str, Any], *, sampling: Sampling | None = None
    ) -> Trajectory:
        """Play one episode of a task."""
        return rollout(self, env, task, sampling=sampling)

    def save(self, path: str | Path) -> Path:
        """Write weights and tokenizer as Hugging Face's `from_pretrained` reads them.

        The state of the optimizer stays in the run's checkpoint.
        """
        folder = Path(path).expanduser()
        if self.source.folder is not None:
            shutil.copytree(
                self.source.folder,
                folder,
                ignore=shutil.ignore_patterns("optimizer.pt"),
                dirs_exist_ok=True,
            )
            return folder
        from skyfleet.models.loading import save_model

        folder.mkdir(parents=True, exist_ok=True)
        save_model(run_sync(self._load()), folder)
        return folder

    def push_to_hub(self, name: str, **settings: Any) -> None:
        """Upload weights and tokenizer to the Hugging Face Hub as `name`."""
        loaded: Any = run_sync(self._load())
        loaded.module.push_to_hub(name, **settings)
        loaded.tokenizer.push_to_hub(name, **settings)

    def serve(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        name: str | None = None,
        allowed_hosts: Sequence[str] = (),
    ) -> Server:
        """Serve the model behind OpenAI's API; see `sf.serve`."""
        return serve(self, host=host, port=port, name=name, allowed_hosts=allowed_hosts)

    def close(self) -> None:
        """Stop the engine; the next call starts it again."""
        if self._opened is not None:
            run_sync(self.aclose())

    def __enter__(self) -> Policy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        at = f", step={self.source.step}" if self.source.step else ""
        return f"Policy({self.source.name!r}{at})"

    async def _load(self) -> LoadedModel:
        if self.source.loaded is not None:
            return self.source.loaded
        from skyfleet.trainer.load_policy import load_policy_model

        if self.source.path in (None, "tiny"):
            raise ConfigError(f"{self!r} has no weights to save; train it first")
        return (await load_policy_model(self.config, [], open_no_env)).loaded


def load_policy(
    model: object,
    *,
    step: int | str = "last",
    tokenizer: Any = None,
    config: ConfigLike = None,
) -> Policy:
    """A policy from a Hugging Face name, a folder, a run or its folder, a URL or a loaded model.

    `step` chooses a run's checkpoint: a number, "last" or "best".

    >>> import skyfleet as sf
    >>> with sf.load_policy("tiny") as policy:
    ...     message = policy.generate("Hello", sampling=sf.Sampling(max_tokens=4))
    >>> message.role
    'assistant'
    """
    folder = _find_run_folder(model)
    if folder is not None and tokenizer is not None:
        raise ConfigError(f"sf.load_policy(tokenizer=...): {folder} has its own; leave it out")
    if folder is None and step != "last":
        raise ConfigError(
            f"sf.load_policy(step={step!r}): {model!r:.60} is not a run, and only a run has steps; "
            "leave it out"
        )
    if folder is not None:
        source = find_run_policy(folder, step)
    else:
        source = resolve_model(model, tokenizer, where="sf.load_policy")
    return Policy(source, inference_config(source, config))


def _find_run_folder(model: object) -> Path | None:
    if isinstance(model, HasRunFolder):
        return model.run_folder
    if isinstance(model, str | Path):
        folder = Path(model).expanduser()
        return folder if (folder / "config.yaml").is_file() else None
    return None
