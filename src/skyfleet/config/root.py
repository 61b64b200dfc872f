"""RunConfig: data + trainer + generator + environment."""

from __future__ import annotations

from skyfleet.config.data import Data
from skyfleet.config.environment import Environment
from skyfleet.config.generator import Generator
from skyfleet.config.section import Section
from skyfleet.config.trainer import Trainer


class RunConfig(Section):
    """Everything a run is told: SkyRL's keys in Fleet's flat spelling, checked and frozen."""

    data: Data = Data()
    trainer: Trainer = Trainer()
    generator: Generator = Generator()
    environment: Environment = Environment()

    @property
    def max_episode_tokens(self) -> int:
        """The longest token sequence of an episode: a prompt at its limit and one more completion."""
        generator = self.generator
        return generator.max_input_length + max(
            generator.sampling_params.max_generate_length,
            generator.eval_sampling_params.max_generate_length,
        )
