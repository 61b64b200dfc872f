"""The rules on the labelled episodes; docs/analysis.md describes how the set was made."""

from __future__ import annotations

from collections import Counter

import pytest
from benchmarks.failure_classes import Labelled, Scores, read_labelled, score
from tests.analysis.label_episodes import FOLDER
from tests.trajectories.making import attempt

from skyfleet.analysis.failure_class import FailureClass

F, G = FailureClass.FALSE_COMPLETION, FailureClass.GAVE_UP


@pytest.fixture(scope="module")
def episodes() -> list[Labelled]:
    return [one for path in sorted(FOLDER.glob("*.jsonl.gz")) for one in read_labelled(path)]


def test_the_set_is_large_and_has_every_class(episodes: list[Labelled]) -> None:
    scripted = [one for one in episodes if not one.mistake.startswith("read ")]
    assert len(scripted) >= 300
    assert len(episodes) - len(scripted) >= 40
    counts = Counter(one.label for one in scripted if one.held_out)
    assert set(counts) == set(FailureClass)
    assert min(counts.values()) >= 10
    assert len({one.episode.env_key for one in scripted}) == 10


def test_the_rules_agree_with_the_labels(episodes: list[Labelled]) -> None:
    assert score(one for one in episodes if not one.held_out).macro_f1 >= 0.95
    assert score(one for one in episodes if one.held_out).macro_f1 >= 0.85


def test_precision_and_recall_are_shares_of_columns_and_rows() -> None:
    scores = Scores(pairs={(F, F): 6, (F, G): 2, (G, G): 3, (G, F): 1})
    assert scores.accuracy == 9 / 12
    assert scores.precision(F) == 6 / 7
    assert scores.recall(F) == 6 / 8
    assert scores.f1(G) == pytest.approx(2 * (3 / 5) * (3 / 4) / (3 / 5 + 3 / 4))
    assert scores.macro_f1 == pytest.approx((scores.f1(F) + scores.f1(G)) / 2)


def test_a_class_without_predictions_has_f1_zero() -> None:
    assert Scores(pairs={(F, G): 2}).f1(F) == 0.0


def test_a_passed_episode_in_the_set_raises() -> None:
    passed = Labelled(label=F, mistake="none", held_out=False, episode=attempt(1.0))
    with pytest.raises(ValueError, match="passed, so it has no class"):
        score([passed])
