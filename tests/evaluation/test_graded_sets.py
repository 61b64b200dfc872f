"""No grade is not a score: an evaluation set without any is an error."""

from __future__ import annotations

import pytest
from tests.trajectories.making import group

from skyfleet.errors import NoLearningSignalError, NothingGradedError
from skyfleet.evaluation.evaluate import GradedSets, check_graded

GRADED, UNGRADED = [group([None, 0.0])], [group([None, None])]


def test_a_set_without_a_grade_is_an_error_even_beside_others() -> None:
    check_graded({"a": GRADED, "empty": []})
    with pytest.raises(NothingGradedError, match=r"^evaluation set b, c: no attempt could be grad"):
        check_graded({"a": GRADED, "b": UNGRADED, "c": UNGRADED})


def test_a_training_run_survives_one_evaluation_without_grades_and_no_second() -> None:
    sets = GradedSets()
    for groups in (GRADED, UNGRADED, GRADED, UNGRADED):
        sets.check("a", groups)
    with pytest.raises(NoLearningSignalError):  # so that the run saves a checkpoint
        sets.check("a", UNGRADED)


def test_a_set_that_was_never_graded_stops_a_training_run_at_once() -> None:
    with pytest.raises(NothingGradedError):
        GradedSets().check("a", UNGRADED)
    GradedSets(stops=False).check("a", UNGRADED)
