"""docs/metrics.md lists every metric that a run logs, and a run logs what the seeds list."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from tests.fakes.small_runs import ELSEWHERE, TRAIN, UNSEEN, small_config

from skyfleet.trainer.training_run import run_training

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
SETS = (
    f"data.train_data=['{TRAIN}', 'world:booking?split=train&count=4']",
    "data.env_weights={booking: 3}",
    "trainer.train_batch_size=4",
    f"data.val_data={{unseen: ['{UNSEEN}']}}",
    f"data.retail_val_data=['{UNSEEN}']",
    f"data.test_data={{airline: ['{ELSEWHERE}'], retail: ['{UNSEEN}']}}",
    "generator.eval_n_samples_per_prompt=3",
    "generator.eval_sampling_params.temperature=1",
    "trainer.max_training_steps=2",
)
TRAINING = {
    "generation/avg_reward", "generation/success_rate", "train/avg_reward", "train/min_reward",
    "train/max_reward", "reward/avg_raw_reward", "reward/parse_failure_rate",
    "loss/avg_raw_rewards", "loss/avg_raw_advantages", "timing/step", "timing/generate",
}  # fmt: skip
PLACEHOLDERS = {
    "env": "[^/]+",
    "name": "[^/]+",
    "test-set": "test-[^/]+",
    "n": r"\d+",
    "k": r"\d+",
}
EVALUATION = {
    "eval/all/avg_score", "eval/github/pass_at_3", "eval-retail/success_rate",
    "test-airline/average_reward", "test-airline/success_rate",
    "test-retail/average_reward", "test-retail/success_rate", "test-retail/pass_hat_3",
}  # fmt: skip
"""Of the main set, `retail_val_data` and two named test sets, with three attempts per task."""


def documented_patterns() -> list[re.Pattern[str]]:
    """The first column of every table, as patterns."""
    keys = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), flags=re.MULTILINE)
    return [re.compile("".join(map(_pattern, re.split(r"(\{[^}]*\})", key)))) for key in keys]


def _pattern(part: str) -> str:
    if not part.startswith("{"):
        return re.escape(part)
    options = (PLACEHOLDERS.get(option, re.escape(option)) for option in part[1:-1].split(","))
    return f"(?:{'|'.join(options)})"


def logged_rows(folder: Path) -> list[dict[str, float]]:
    """`metrics.jsonl` and `timing.jsonl` joined by step."""
    files = (folder / name for name in ("metrics.jsonl", "timing.jsonl"))
    metrics, timing = ([json.loads(x) for x in file.read_text().splitlines()] for file in files)
    return [{**one, **other} for one, other in zip(metrics, timing, strict=True)]


def is_documented(key: str, patterns: list[re.Pattern[str]]) -> bool:
    return any(pattern.fullmatch(key) for pattern in patterns)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("eval/github/pass_at_3", True),
        ("eval/all/avg_score", True),
        ("eval-retail/success_rate", True),
        ("test-airline/average_reward", True),
        ("environment/github/my_metric", True),
        ("generation/ending_done", False),
        ("generate/env_init_failures", False),
    ],
)
def test_the_patterns_of_the_table_match_keys(key: str, expected: bool) -> None:
    assert is_documented(key, documented_patterns()) == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    asyncio.run(run_training(small_config(folder, *SETS)))
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> list[dict[str, float]]:
    return logged_rows(folder)


def test_every_logged_metric_is_in_the_table(run: list[dict[str, float]]) -> None:
    patterns = documented_patterns()
    logged = {key for row in run for key in row} - {"step"}
    assert sorted(key for key in logged if not is_documented(key, patterns)) == []


def test_the_training_metrics_of_the_seeds_are_logged_at_every_step(
    run: list[dict[str, float]],
) -> None:
    for row in run[1:]:
        assert row.keys() >= TRAINING


def test_a_step_whose_groups_are_all_filtered_has_the_metrics_without_a_value(
    tmp_path: Path,
) -> None:
    """The first steps of the small model solve nothing, so the rewards of all groups are equal."""
    sets = ("trainer.algorithm.zero_variance_filter=true", "trainer.max_training_steps=1")
    asyncio.run(run_training(small_config(tmp_path, *sets)))
    row = logged_rows(tmp_path)[-1]
    assert row.keys() >= TRAINING
    assert (row["loss/num_samples"], row["generation/avg_reward"]) == (0.0, 0.0)
    names = {name for name in TRAINING if name.startswith(("train/", "loss/"))}
    assert {name: row[name] for name in names} == dict.fromkeys(names)


def test_the_evaluation_metrics_of_the_seeds_are_logged_at_every_evaluation(
    run: list[dict[str, float]],
) -> None:
    for row in (run[0], run[-1]):
        assert row.keys() >= EVALUATION


def test_every_batch_has_every_domain_in_the_proportion_of_its_weight(
    run: list[dict[str, float]],
) -> None:
    """Four prompts with four attempts each: three of booking, whose weight is 3, and one of github."""
    for row in run[1:]:
        counts = [row[f"environment/{env}/num_episodes"] for env in ("booking", "github")]
        assert counts == [12, 4]
        assert "reward/booking/pass_hat_4" in row


def test_the_first_set_is_the_main_set_whatever_it_is_called(run: list[dict[str, float]]) -> None:
    assert not [key for row in run for key in row if "unseen" in key]


def test_timing_is_in_a_file_of_its_own(folder: Path) -> None:
    metrics, timing = (
        {key for line in (folder / name).read_text().splitlines() for key in json.loads(line)}
        for name in ("metrics.jsonl", "timing.jsonl")
    )
    assert not [key for key in metrics if key.startswith("timing/")]
    assert timing >= {"timing/step", "timing/generate"}


def test_metrics_of_a_run_with_named_sets_are_byte_identical_for_one_seed(
    folder: Path, tmp_path: Path
) -> None:
    asyncio.run(run_training(small_config(tmp_path, *SETS)))
    assert (tmp_path / "metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()
