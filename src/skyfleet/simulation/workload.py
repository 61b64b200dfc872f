"""Workload: the episodes of a simulated run, in tokens and seconds of their environments."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from pathlib import Path
from random import Random

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skyfleet.errors import ConfigError


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Distribution(_Record):
    """Lognormal, or constant with sigma=0."""

    mean: float = Field(ge=0)
    sigma: float = Field(0.0, ge=0)
    """Of the logarithm."""

    def draw(self, rng: Random) -> float:
        if not self.sigma or not self.mean:
            return self.mean
        return rng.lognormvariate(log(self.mean) - self.sigma**2 / 2, self.sigma)

    def __str__(self) -> str:
        return f"{self.mean:g}" + (f" (lognormal, sigma {self.sigma:g})" if self.sigma else "")


def parse_distribution(text: str, *, option: str) -> Distribution:
    """`0.2`, or `lognormal:0.2:0.5` with the mean and the sigma of the logarithm."""
    parts = text.removeprefix("lognormal:").split(":")
    try:
        if text.startswith("lognormal:") and len(parts) == 2:
            return Distribution(mean=float(parts[0]), sigma=float(parts[1]))
        return Distribution(mean=float(text))
    except ValueError:
        raise ConfigError(
            f"{option} {text} is not a time in seconds; write 0.2, or lognormal:MEAN:SIGMA such as "
            "lognormal:0.2:0.5"
        ) from None


class Lengths(_Record):
    """Episodes by the distributions of their parts."""

    prompt_tokens: Distribution
    turns: Distribution
    sampled_tokens: Distribution
    """Per turn."""
    reply_tokens: Distribution
    """What the environment adds after a turn."""


class Workload(_Record):
    source: str
    """Where it comes from, in words; shown beside the results."""
    recorded: list[list[tuple[int, int]]] = Field([])
    """Episodes as played: per turn the tokens before it, and those sampled in it."""
    lengths: Lengths | None = None
    """Instead of recorded episodes."""
    reset_seconds: Distribution = Distribution(mean=0.0)
    tool_seconds: Distribution = Distribution(mean=0.0)
    """Of each turn but the last."""
    grade_seconds: Distribution = Distribution(mean=0.0)
    trained_share: float = Field(1.0, gt=0, le=1)
    """Groups from which something is learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePlan:
    """One episode, drawn."""

    turns: tuple[tuple[int, int], ...]
    """Per turn: new tokens before it, tokens sampled in it."""
    tool_seconds: tuple[float, ...]
    reset_seconds: float
    grade_seconds: float

    @property
    def n_tokens(self) -> int:
        return sum(map(sum, self.turns))

    @property
    def n_sampled(self) -> int:
        return sum(sampled for _, sampled in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Of the configuration: no episode exceeds them."""

    max_turns: int
    max_input_length: int
    max_generate_length: int


def draw_episode(
    workload: Workload, limits: EpisodeLimits, *, seed: int, group: int, sample: int
) -> EpisodePlan:
    """The same for the same numbers, in every loop and placement."""
    rng = Random(f"{seed}/{group}/{sample}")
    turns = (
        [(before, sampled) for before, sampled in rng.choice(workload.recorded)]
        if workload.recorded
        else _draw_turns(workload.lengths, limits, rng, Random(f"{seed}/{group}"))
    )
    return EpisodePlan(
        turns=tuple(turns),
        tool_seconds=tuple(workload.tool_seconds.draw(rng) for _ in turns[1:]),
        reset_seconds=workload.reset_seconds.draw(rng),
        grade_seconds=workload.grade_seconds.draw(rng),
    )


def _draw_turns(
    lengths: Lengths | None, limits: EpisodeLimits, rng: Random, task_rng: Random
) -> list[tuple[int, int]]:
    """Attempts at a task share its prompt; an episode ends before a turn whose prompt is too long."""
    if lengths is None:
        raise ConfigError(
            "the workload has neither recorded episodes nor lengths; give one of them"
        )
    before = max(1, round(lengths.prompt_tokens.draw(task_rng)))
    n_turns = min(max(1, round(lengths.turns.draw(rng))), limits.max_turns)
    turns: list[tuple[int, int]] = []
    context = 0
    for _ in range(n_turns):
        if turns and context + before > limits.max_input_length:
            break
        before = min(before, limits.max_input_length)
        sampled = max(1, round(lengths.sampled_tokens.draw(rng)))
        turns.append((before, min(sampled, limits.max_generate_length)))
        context += sum(turns[-1])
        before = max(1, round(lengths.reply_tokens.draw(rng)))
    return turns


def read_workload(path: Path) -> Workload:
    try:
        return Workload.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"--workload {path}: no such file") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"--workload {path}: {name}: {first['msg']}; correct the file") from None
