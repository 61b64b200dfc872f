"""A resumed run compares only grades of the same tasks and the same code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyfleet as sf

TASKS = [{"key": f"t{n}", "prompt": f"Write {n}.", "least": 500} for n in range(4)]
HELD_OUT = [{"key": f"e{n}", "prompt": f"Write {n} now.", "least": 500} for n in range(8)]


def train(folder: Path, steps: int, *, reward: Callable[..., float], evaluation: Any) -> Any:
    return sf.train(
        "tiny",
        reward=reward,
        tasks=TASKS,
        eval=evaluation,
        steps=steps,
        batch_size=2,
        algorithm=sf.GRPO(group_size=2, kl=0),
        sampling=sf.Sampling(max_tokens=4),
        run_dir=folder,
        config={"trainer.policy.model_config_kwargs": {"hidden_size": 32, "num_hidden_layers": 1}},
    )


def is_long(task: Any, answer: str) -> float:
    return float(len(answer) >= task["least"])


@pytest.mark.parametrize("derives_keys", [False, True])
def test_edited_evaluation_tasks_are_refused_before_training_goes_on(
    tmp_path: Path, derives_keys: bool
) -> None:
    def drop_key(task: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in task.items() if not (derives_keys and k == "key")}

    train(tmp_path, 1, reward=is_long, evaluation={"val": map(drop_key, HELD_OUT)})
    edited = [drop_key({**task, "least": 0}) for task in HELD_OUT]
    with pytest.raises(sf.ConfigError, match=r"data\.val_data\.val \(eval= .* a new folder"):
        train(tmp_path, 2, reward=is_long, evaluation={"val": edited})
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [0, 1]
    if not derives_keys:
        # Another order, and a further set, are allowed.
        sets = {"val": HELD_OUT[::-1], "edited": [{**t, "key": f"x{t['key']}"} for t in edited]}
        result = train(tmp_path, 2, reward=is_long, evaluation=sets)
        assert [one.name for one in result.comparison.sets] == ["val"]


LEAST = 500


def is_longer(answer: str) -> float:
    return float(len(answer) >= LEAST)


def test_no_verdict_between_grades_of_different_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = train(tmp_path, 1, reward=is_longer, evaluation=HELD_OUT)
    assert first.comparison.verdict == "FAILING"
    assert not caplog.records
    monkeypatch.setattr(f"{__name__}.LEAST", 0)
    result = train(tmp_path, 2, reward=is_longer, evaluation=HELD_OUT)
    assert result.step == 2
    (warning,) = (one.getMessage() for one in caplog.records if "has changed" in one.getMessage())
    assert "(LEAST)" in warning
    assert "a new folder" in warning
    assert result.table is None
    assert not (tmp_path / "results.md").exists()
    assert "graded by different code (LEAST), so there is no verdict" in str(result.comparison)
    assert "IMPROVED" not in str(result.comparison)
    assert result.best_step == 2  # the only evaluation of this code
    caplog.clear()
    # Evaluations outside of the run are compared by the same rule.
    now = sf.evaluate("null", tasks=HELD_OUT, reward=is_longer)
    assert "no verdict" not in str(sf.compare(result.run, now))
    monkeypatch.setattr(f"{__name__}.LEAST", 500)
    then = sf.evaluate("null", tasks=HELD_OUT, reward=is_longer)
    assert "no verdict" in str(sf.compare(result.run, then))
