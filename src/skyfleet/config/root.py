"""RunConfig: the whole configuration of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import PrivateAttr

from skyfleet.config.data import Data
from skyfleet.config.environment import Environment
from skyfleet.config.generator import Generator
from skyfleet.config.section import Section
from skyfleet.config.trainer import Trainer


class RunConfig(Section):
    """SkyRL's keys in Fleet's flat spelling, validated and frozen."""

    data: Data = Data()
    trainer: Trainer = Trainer()
    generator: Generator = Generator()
    environment: Environment = Environment()

    _ignored_keys: Mapping[str, Any] = PrivateAttr(default_factory=dict)
    _override_keys: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def ignored_keys(self) -> Mapping[str, Any]:
        """SkyRL's keys that were set and that no section has; a run warns about them."""
        return self._ignored_keys

    def with_ignored_keys(self, keys: Mapping[str, Any]) -> RunConfig:
        copy = self.model_copy()
        copy._ignored_keys = dict(keys)
        return copy

    @property
    def override_keys(self) -> frozenset[str]:
        """The keys set by overrides, not by a file or a preset: a run never changes their values."""
        return self._override_keys

    def __eq__(self, other: object) -> bool:
        """Two configurations with the same values are equal, however the values were set."""
        if isinstance(other, RunConfig):
            other = other.with_override_keys(self._override_keys)
        return super().__eq__(other)

    def with_override_keys(self, keys: Iterable[str]) -> RunConfig:
        copy = self.model_copy()
        copy._override_keys = frozenset(keys)
        return copy

    @property
    def max_episode_tokens(self) -> int:
        """The longest token sequence of an episode: the longest prompt plus one completion."""
        generator = self.generator
        return generator.max_input_length + max(
            generator.sampling_params.max_generate_length,
            generator.eval_sampling_params.max_generate_length,
        )
