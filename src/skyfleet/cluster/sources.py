"""Sources: the environment factories and agents that workers have, each sent once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

from skyfleet.chat.renderer import Renderer
from skyfleet.cluster.messages import AddSource
from skyfleet.cluster.packing import pack_function
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.rollouts.policy_agent import PolicyAgent

MakeRenderer = Callable[[Any], Renderer]


class Sources:
    """Known by identity, so that none is pickled twice."""

    def __init__(self, make_renderer: MakeRenderer | None = None) -> None:
        """`make_renderer` makes an agent's renderer of its tokenizer; without it, it is sent too."""
        self._make_renderer = make_renderer
        self._known: list[tuple[Any, AddSource]] = []

    def __getitem__(self, key: int) -> AddSource:
        return self._known[key][1]

    def find(self, value: Any, what: str) -> int:
        """The key of an object, which is sent itself if it is new."""
        for known, source in self._known:
            if known is value or _differ_in_sampling(known, value):
                return source.key
        if not isinstance(value, PolicyAgent):
            return self.add(value, partial(_return, value), what)
        agent: Any = replace(value, engine=cast("Any", None), sampling=SamplingParams())
        if self._make_renderer is not None:
            agent = replace(agent, renderer=cast("Any", None))
        return self.add(value, partial(_build_agent, agent, self._make_renderer), what)

    def add(self, value: Any, build: Callable[[], Any], what: str) -> int:
        """`build` returns what a worker has in the place of `value`."""
        source = AddSource(key=len(self._known), packed=pack_function(build, what), what=what)
        self._known.append((value, source))
        return source.key


def _return(value: Any) -> Any:
    return value


def _build_agent(agent: PolicyAgent, make_renderer: MakeRenderer | None) -> PolicyAgent:
    """In a worker. Caches and compiled templates of the driver's renderer cannot be sent."""
    if make_renderer is None:
        return agent
    return replace(agent, renderer=make_renderer(agent.tokenizer))


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
