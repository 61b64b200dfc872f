"""Sources: the environment factories and agents that workers have, each sent once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from skyfleet.cluster.messages import AddSource
from skyfleet.cluster.packing import pack_function
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.rollouts.policy_agent import PolicyAgent


class Sources:
    """Known by identity, so that none is pickled twice."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, AddSource]] = []

    def __getitem__(self, key: int) -> AddSource:
        return self._known[key][1]

    def find(self, value: Any, what: str) -> int:
        """The key of an object, which is sent itself if it is new."""
        for known, source in self._known:
            if known is value or _differ_in_sampling(known, value):
                return source.key
        return self.add(value, _Constant(_without_engine(value)), what)

    def add(self, value: Any, build: Callable[[], Any], what: str) -> int:
        """`build` returns what a worker has in the place of `value`."""
        source = AddSource(key=len(self._known), packed=pack_function(build, what), what=what)
        self._known.append((value, source))
        return source.key


@dataclass(frozen=True, slots=True)
class _Constant:
    """A function that returns what it was pickled with."""

    value: Any

    def __call__(self) -> Any:
        return self.value


def _without_engine(value: Any) -> Any:
    if not isinstance(value, PolicyAgent):
        return value
    return replace(value, engine=None, sampling=SamplingParams())  # type: ignore[arg-type]


def _differ_in_sampling(known: Any, value: Any) -> bool:
    """Whether two agents are the same for a worker: sampling parameters are sent with each episode."""
    if not (isinstance(known, PolicyAgent) and isinstance(value, PolicyAgent)):
        return False
    return (
        known.renderer is value.renderer
        and known.tokenizer is value.tokenizer
        and known.status == value.status
        and (known.max_input_length, known.native, known.one_message, known.session_prefix)
        == (value.max_input_length, value.native, value.one_message, value.session_prefix)
    )
