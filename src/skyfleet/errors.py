"""Every failure has a name.

A `SkyfleetError` stops the run with one sentence. An `EpisodeError` ends one episode: the loop
records it on the trajectory and goes on, because a failed episode is data.
"""

from __future__ import annotations


class SkyfleetError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(SkyfleetError, ValueError):
    """A setting is unknown, missing, or contradicts another."""


class TaskError(SkyfleetError, ValueError):
    """A task row cannot be read or makes no sense."""


class ModelError(SkyfleetError, RuntimeError):
    """A model or tokenizer cannot be found, read or used."""


class EngineLostError(ModelError):
    """An engine that is trained has died: the run goes on if others can stand in for it."""

    def __init__(self, reason: str, way_out: str) -> None:
        super().__init__(f"{reason}; {way_out}")
        self.reason = reason


class CheckpointError(SkyfleetError, RuntimeError):
    """A checkpoint is absent, partial, or from another run."""


class SentinelError(SkyfleetError, RuntimeError):
    """Something that must be true in every step was not."""


class NoLearningSignalError(SentinelError):
    """There is nothing to learn from any more; what was learnt before is sound, and is saved."""


class MissingExtraError(SkyfleetError, ImportError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, *, constrained: bool = True) -> None:
        """Without constraints where the package wants other versions than we test with."""
        versions = "-c constraints.txt " if constrained else ""
        super().__init__(
            f"{package} is not installed; it comes with the extra {extra}: in a clone, "
            f"pip install {versions}-e '.[{extra}]'"
        )


class EpisodeError(SkyfleetError):
    """Ends one episode, never the run."""


class EnvError(EpisodeError):
    """The environment could not be opened or stepped."""


class VerifierError(EpisodeError):
    """The grade could not be computed."""


class EngineError(EpisodeError):
    """The engine returned no usable completion."""


class ContextFullError(EngineError):
    """The conversation is longer than the engine takes: the episode ends there and is graded."""


class _Blame:
    # Entered in every step of every episode, and a generator takes four times as long.
    def __init__(self, kind: type[EpisodeError], doing: str) -> None:
        self._kind, self._doing = kind, doing

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, EpisodeError):
            raise self._kind(f"{self._doing}: {type(error).__name__}: {error}") from error


def wrap_errors(kind: type[EpisodeError], doing: str) -> _Blame:
    """Name whatever escapes: `doing` failed, and `kind` says whose fault it was.

    An error that already has a name keeps it. Cancellation passes through.
    """
    return _Blame(kind, doing)
