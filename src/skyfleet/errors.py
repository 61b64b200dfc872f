"""The exception tree.

SkyfleetError          stops the run with one sentence
├── ConfigError, TaskError, ModelError (EngineLostError), CheckpointError,
│   SentinelError (NoLearningSignalError), MissingExtraError
└── EpisodeError       ends one episode, is recorded on its trajectory, and the run continues
    └── EnvError (AbandonedCallError), VerifierError, EngineError (ContextFullError)
"""

from __future__ import annotations


class SkyfleetError(Exception):
    """Base class of every exception that skyfleet raises."""


class ConfigError(SkyfleetError, ValueError):
    """A configuration key is unknown, missing, invalid, or contradicts another."""


class TaskError(SkyfleetError, ValueError):
    """A task row is invalid."""


class ModelError(SkyfleetError, RuntimeError):
    """A model or tokenizer cannot be found, loaded or used."""


class EngineLostError(ModelError):
    """A trained engine died; the run continues if the pool has others."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason


class CheckpointError(SkyfleetError, RuntimeError):
    """A checkpoint is missing, incomplete, or belongs to another run."""


class SentinelError(SkyfleetError, RuntimeError):
    """A runtime invariant check failed."""


class NoLearningSignalError(SentinelError):
    """No step gives a learning signal any more; the run saves its checkpoint and stops."""


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
    """One episode failed; the run continues."""


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
