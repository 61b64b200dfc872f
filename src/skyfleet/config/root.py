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
    _variables: Mapping[str, str] = PrivateAttr(default_factory=dict)
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
    def variables(self) -> Mapping[str, str]:
        """The environment variables that the values were read from, for `config.redaction`."""
        return self._variables

    def with_variables(self, variables: Mapping[str, str]) -> RunConfig:
        copy = self.model_copy()
        copy._variables = dict(variables)
        return copy

    @property
    def override_keys(self) -> frozenset[str]:
        """The keys set by overrides, not by a file or a preset: a run never changes their values."""
        return self._override_keys

    def with_override_keys(self, keys: Iterable[str]) -> RunConfig:
        copy = self.model_copy()
        copy._override_keys = frozenset(keys)
        return copy

    def __eq__(self, other: object) -> bool:
        """Two configurations with the same values are equal, however the values were set."""
        if not isinstance(other, RunConfig):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in RunConfig.model_fields)

    @property
    def max_episode_tokens(self) -> int:
        """The longest token sequence of an episode: the longest prompt plus one completion."""
        generator = self.generator
        return generator.max_input_length + max(
            generator.sampling_params.max_generate_length,
            generator.eval_sampling_params.max_generate_length,
        )
