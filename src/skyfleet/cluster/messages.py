"""Messages between the driver and a rollout worker.

A worker has no engine: it asks the driver, so that the engine pool, its failover and the invariant
checks see every request of every worker.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from skyfleet.chat.transcript import Completion
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import EpisodeError, SkyfleetError
from skyfleet.rollouts.episode import Limits
from skyfleet.tracking.tracing import Span
from skyfleet.trajectories.trajectory import Trajectory

ErrorT = TypeVar("ErrorT", bound=SkyfleetError)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddSource:
    """Something that many episodes use, sent once: an environment factory or an agent."""

    key: int
    packed: bytes
    """A pickled function that returns it."""
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEpisode:
    episode: int
    task: bytes
    verifier_is_own: bool
    """The driver wrote the task's verifier, so that it needs no jail in the worker either."""
    env: int
    """The key of its source."""
    agent: int
    sampling: SamplingParams | None
    """Of a `PolicyAgent`, which is sent without them; None for any other agent."""
    limits: Limits
    sample: int
    is_traced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelEpisode:
    episode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The engine's answer to a request: a completion or an error that ends the episode."""

    request: int
    completion: Completion | None = None
    error: EpisodeError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDowntime:
    """Time that a request has lost to a failing engine so far, for the clock of its episode."""

    request: int
    seconds: float
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    episode: int
    request: int
    token_ids: array[int]
    sampling: SamplingParams
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest:
    request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSession:
    episode: int
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFinished:
    episode: int
    trajectory: Trajectory
    spans: Sequence[Span] = ()
    """Start and end count from the start of the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStopped:
    """It was cancelled, or an error stops the run."""

    episode: int
    error: SkyfleetError | None = None
    """None: it was cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """What a logger of the worker wrote."""

    logger: str
    level: int
    text: str


ToWorker = AddSource | StartEpisode | CancelEpisode | Answer | EngineDowntime
FromWorker = (
    GenerateRequest | CancelRequest | ReleaseSession | EpisodeFinished | EpisodeStopped | LogLine
)


def make_portable(error: ErrorT) -> ErrorT:
    """The error without its causes; its nearest base class if it cannot be pickled."""
    error.__cause__ = error.__context__ = None
    kinds: Sequence[Any] = [k for k in type(error).__mro__ if issubclass(k, SkyfleetError)]
    for candidate in (error, *(kind.__new__(kind, str(error)) for kind in kinds)):
        try:
            copied: ErrorT = pickle.loads(pickle.dumps(candidate))
            return copied
        except Exception:
            continue
    raise AssertionError  # SkyfleetError itself can be pickled
