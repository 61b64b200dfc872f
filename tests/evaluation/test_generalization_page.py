"""docs/generalization.md: its tables hold what the presets and the power functions say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyfleet.config.keys import value_at
from skyfleet.config.loading import load_config_file
from skyfleet.metrics.significance import detectable_difference, tasks_needed

PAGE = (Path(__file__).parents[2] / "docs" / "generalization.md").read_text(encoding="utf-8")
ATTEMPTS = (1, 2, 4, 8)
CHANGED = 0.25
"""Share of tasks whose result differs between two single attempts."""
ALGORITHM, OPTIMIZER = "trainer.algorithm", "trainer.policy.optimizer_config"
SECTIONS = {
    "lr": OPTIMIZER,
    "num_warmup_steps": OPTIMIZER,
    "weight_decay": OPTIMIZER,
    "max_grad_norm": OPTIMIZER,
    "temperature": "generator.sampling_params",
    "top_p": "generator.sampling_params",
    "n_samples_per_prompt": "generator",
    **dict.fromkeys(("kl_loss_coef", "eps_clip_low", "eps_clip_high", "value_clip"), ALGORITHM),
}


def find_rows(section: str, pattern: str) -> list[list[str]]:
    text = PAGE.split(f"## {section}")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if re.match(rf"\| {pattern}", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_detectable_differences_are_those_of_the_power_function() -> None:
    rows = find_rows("How large a difference is detected", r"\d+ ?(?:\(|\|)")
    assert len(rows) == 5
    for name, *cells in rows:
        n_tasks = int(name.split()[0])
        found = [100 * detectable_difference(n_tasks, CHANGED / k, attempts=k) for k in ATTEMPTS]
        assert cells == [f"{value:.1f}" for value in found]


def test_the_tasks_needed_are_those_of_the_power_function() -> None:
    rows = find_rows("How large a difference is detected", r"\d+ points")
    assert len(rows) == 4
    for name, *cells in rows:
        points = int(name.split()[0]) / 100
        needed = [tasks_needed(points, max(CHANGED / k, points**2), attempts=k) for k in ATTEMPTS]
        assert cells == [f"{n:,}" for n in needed]


def test_the_table_of_presets_has_the_presets_values() -> None:
    (header,) = find_rows("Presets", r"\| `generalise_plain`")
    trees = [load_config_file(name.strip("`")).model_dump() for name in header[1:]]
    rows = find_rows("Presets", "`")
    assert len(rows) == 12
    for names, *cells in rows:
        for index, key in enumerate(re.findall(r"`(\w+)`", names)):
            path = f"{SECTIONS.get(key, 'trainer')}.{key}"
            for tree, cell in zip(trees, cells, strict=True):
                shown = cell.split(", ")
                assert value_at(tree, path) == pytest.approx(
                    float(shown[min(index, len(shown) - 1)])
                )
