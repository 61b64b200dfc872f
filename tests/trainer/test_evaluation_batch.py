"""trainer.eval_batch_size bounds the prompts that an evaluation attempts at once."""

from __future__ import annotations

import pytest

from skyfleet.config.loading import load_config
from skyfleet.trainer.evaluation import count_concurrent


@pytest.mark.parametrize(
    ("batch", "n_samples", "max_num_seqs", "expected"),
    [("null", 3, 64, 64), ("8", 3, 64, 24), ("32", 3, 64, 64), ("1", 1, 64, 1)],
)
def test_episodes_at_once_are_the_prompts_times_their_attempts(
    batch: str, n_samples: int, max_num_seqs: int, expected: int
) -> None:
    config = load_config(
        "",
        [
            f"trainer.eval_batch_size={batch}",
            f"generator.eval_n_samples_per_prompt={n_samples}",
            f"generator.max_num_seqs={max_num_seqs}",
        ],
    )
    assert count_concurrent(config) == expected
