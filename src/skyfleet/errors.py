"""The exception tree.

SkyfleetError          stops the run with one sentence
├── ConfigError, TaskError, ModelError (EngineLostError, OutOfMemoryError), CheckpointError,
│   DiskFullError, SentinelError (NoLearningSignalError (NothingGradedError)), MissingExtraError
└── EpisodeError       ends one episode, is recorded on its trajectory, and the run continues
    └── EnvError (AbandonedCallError), VerifierError, EngineError (ContextFullError)
"""

from __future__ import annotations

import errno
import os
from importlib.util import find_spec

from skyfleet.redaction import redact


class SkyfleetError(Exception):
    """Base class of every exception that skyfleet raises; its text shows no secret.

    >>> import skyfleet as sf
    >>> try:
    ...     sf.load_run("runs/missing")
    ... except sf.SkyfleetError as error:
    ...     print(error)
    runs/missing is not a run folder: it has no config.yaml; pass runs/<run_name>
    """

    def __str__(self) -> str:
        return redact(super().__str__())


class ConfigError(SkyfleetError, ValueError):
    """A configuration key is unknown, missing, invalid, or contradicts another.

    The message names the key, its value and a remedy.

    >>> import skyfleet as sf
    >>> try:
    ...     sf.train(config=["tiny", {"trainer.train_batch_sise": 8}])
    ... except sf.ConfigError as error:
    ...     print(error)
    trainer.train_batch_sise=8 is unknown; did you mean trainer.train_batch_size?
    """


class TaskError(SkyfleetError, ValueError):
    """A task row is invalid. The message names the row and the field.

    >>> import skyfleet as sf
    >>> try:
    ...     sf.split([{"times": 3}], eval_ratio=0.5)
    ... except sf.TaskError as error:
    ...     print(error)
    tasks row 1: prompt is missing; add it
    """


class ModelError(SkyfleetError, RuntimeError):
    """A model or tokenizer cannot be found, loaded or used."""


class EngineLostError(ModelError):
    """A trained engine died; the run continues if the pool has others."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason


class OutOfMemoryError(ModelError):
    """The engine or the learner could not get the memory that it needs."""


class CheckpointError(SkyfleetError, RuntimeError):
    """A checkpoint is missing, incomplete, or belongs to another run."""


class DiskFullError(SkyfleetError, RuntimeError):
    """A file was not written because its file system is full or a quota is used up."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason
        self.safe = "what was written before is intact"

    def __str__(self) -> str:
        return (
            f"{self.path} was not written: {self.reason}; free some space and run the same command "
            f"again: {self.safe}"
        )


class SentinelError(SkyfleetError, RuntimeError):
    """A runtime invariant check failed."""


class NoLearningSignalError(SentinelError):
    """No step gives a learning signal any more; the run saves its checkpoint and stops."""


class NothingGradedError(NoLearningSignalError):
    """No attempt at an evaluation set has a grade, so there is no score.

    >>> import skyfleet as sf
    >>> sf.evaluate("null", reward=lambda answer: None, tasks=[{"prompt": "Hello"}])
    Traceback (most recent call last):
    ...
    skyfleet.errors.NothingGradedError: evaluation set val: no attempt could be graded, ...
    """


class MissingExtraError(SkyfleetError, ImportError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, *, constrained: bool = True) -> None:
        """`constrained=False` if the package needs other versions than constraints.txt pins."""
        versions = "-c constraints.txt " if constrained else ""
        super().__init__(
            f"{package} is not installed; it comes with the extra {extra}: in a clone, "
            f"pip install {versions}-e '.[{extra}]'"
        )


class EpisodeError(SkyfleetError):
    """One episode failed; the run continues.

    Its text is not redacted, because an agent may get it as the answer of a tool; what is recorded
    and logged of it is.
    """

    def __str__(self) -> str:
        return Exception.__str__(self)


class EnvError(EpisodeError):
    """An environment could not be opened, reset or stepped."""


class AbandonedCallError(EnvError):
    """A call of an environment ignored its cancellation."""


class VerifierError(EpisodeError):
    """A grade could not be computed, so it is unknown."""


class EngineError(EpisodeError):
    """An engine returned no usable completion."""


class ContextFullError(EngineError):
    """The prompt is longer than the engine's context; the episode ends and is graded."""

    is_by_server = False
    """Whether only a server said so: then it ends no episode in which it has not sampled a turn."""


class _WrapErrors:
    # A class, because a generator-based context manager takes four times as long per step.
    def __init__(self, kind: type[EpisodeError], during: str) -> None:
        self._kind, self._during = kind, during

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, EpisodeError):
            raise self._kind(f"{self._during}: {type(error).__name__}: {error}") from error


def wrap_errors(kind: type[EpisodeError], during: str) -> _WrapErrors:
    """Turn other exceptions into `kind`, with `during` in the message.

    An EpisodeError and a cancellation pass through unchanged.
    """
    return _WrapErrors(kind, during)


def is_outage(error: BaseException) -> bool:
    """Whether the same command may succeed later: a bucket or an engine did not answer."""
    temporary = (errno.EIO, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)
    return isinstance(error, EngineLostError) or (
        isinstance(error, OSError) and error.errno in temporary
    )


def require_torch() -> None:
    """Raise MissingExtraError if torch or transformers is missing."""
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "train")
    # Idle OpenMP threads spin by default, which slows a busy machine down many times.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
