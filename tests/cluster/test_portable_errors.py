"""Errors between processes keep their class and their text."""

from __future__ import annotations

import pickle

import pytest

from skyfleet.cluster.messages import make_portable
from skyfleet.errors import (
    ContextFullError,
    EngineError,
    EngineLostError,
    MissingExtraError,
    SkyfleetError,
)


@pytest.mark.parametrize(
    "error",
    [EngineError("no answer"), EngineLostError("it died", "restart it"), ContextFullError("full")],
)
def test_an_error_arrives_with_its_class_and_text(error: SkyfleetError) -> None:
    arrived = pickle.loads(pickle.dumps(make_portable(error)))
    assert (type(arrived), str(arrived)) == (type(error), str(error))


def test_what_the_engine_pool_reads_of_an_error_arrives() -> None:
    by_server = ContextFullError("full")
    by_server.is_by_server = True
    assert make_portable(by_server).is_by_server
    assert make_portable(EngineLostError("it died", "restart it")).reason == "it died"


def test_a_cause_that_cannot_be_pickled_is_left_out() -> None:
    error = EngineError("no answer")
    error.__cause__ = ValueError(lambda: None)
    assert make_portable(error).__cause__ is None


def test_an_error_with_another_constructor_arrives_as_its_base_class_with_its_text() -> None:
    error = MissingExtraError("ray", "ray")
    arrived = make_portable(error)
    assert isinstance(arrived, SkyfleetError)
    assert str(arrived) == str(error)
