"""Orchestration: what the agent loop itself costs, with an engine and a world that cost nothing.

Turns per CPU-second count everything between two completions but rendering: the renderer hands out
ready tokens. Latency is the time from when a completion is due to the same episode's next request,
while many episodes run and the engine answers each after a while. Rendering is timed by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import Sequence
from platform import machine, python_version
from random import Random
from statistics import median, quantiles
from time import perf_counter, process_time

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.transcript import Completion
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Env, Observation, Step
from skyfleet.rollouts.conversation import TokenConversation
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.tasks.task import Grade, Task

TURN_TOKENS, REPLY_TOKENS, PROMPT_TOKENS = 48, 32, 512
ACTION = Message(role="assistant", content="I look around.")
REPLY = Message(role="tool", content="Nothing here.")
SAMPLING = SamplingParams()


class ReadyTokens:
    """A renderer that has rendered already."""

    stop_token_ids: tuple[int, ...] = (0,)

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return [5] * PROMPT_TOKENS

    def join(self, last_token: int, messages: Sequence[Message]) -> list[int] | None:
        return [6] * REPLY_TOKENS

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        return ACTION

    def write(self, message: Message) -> list[int]:
        return [7] * TURN_TOKENS

    def text(self, token_ids: Sequence[int]) -> str:
        return ""


class ScriptedEngine:
    """Says the same, after `seconds` more or less; notes how long each session took to ask again."""

    policy_version = 0

    def __init__(self, *, seconds: float) -> None:
        self.latencies: list[float] = []
        self._seconds, self._draw = seconds, Random(0)
        self._answered: dict[str, float] = {}
        self._completion = Completion(
            token_ids=(7,) * TURN_TOKENS,
            logprobs=(-0.5,) * TURN_TOKENS,
            finish="stop",
            policy_version=0,
        )

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        if session in self._answered:
            self.latencies.append(perf_counter() - self._answered[session])
        seconds = self._seconds * self._draw.uniform(0.5, 1.5)
        # From when it is due: an event loop that is late with it counts.
        self._answered[session] = perf_counter() + seconds
        await asyncio.sleep(seconds)
        return self._completion

    async def release(self, session: str) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class Room:
    """Always answers, never ends."""

    async def reset(self) -> Observation:
        return Observation(messages=(Message(role="user", content="Look around."),))

    async def step(self, action: Message) -> Step:
        return Step(messages=(REPLY,))

    async def grade(self) -> Grade | None:
        return Grade(reward=0.0, success=False)

    async def close(self) -> None: ...


async def open_room(task: Task) -> Env:
    return Room()


async def played(n_episodes: int, n_turns: int, engine: ScriptedEngine) -> float:
    """CPU seconds of that many episodes at once."""
    tasks = [Task(key=f"t{i}", env_key="room", prompt="?") for i in range(n_episodes)]
    limits = Limits(max_turns=n_turns, max_input_length=1 << 30, trajectory_timeout_seconds=900)

    def policy(task: Task, opening: Observation, session: str) -> TokenConversation:
        return TokenConversation(
            opening, engine=engine, renderer=ReadyTokens(), sampling=SAMPLING, session=session
        )

    start = process_time()
    groups = await collect(tasks, open_room, policy, limits, n_samples=1, max_concurrent=n_episodes)
    seconds = process_time() - start
    assert sum(len(t.turns) for group in groups for t in group.trajectories) == n_episodes * n_turns
    return seconds


def rendered(renderer: Renderer, n_turns: int) -> tuple[int, float]:
    """Tokens and CPU seconds of rendering one conversation, turn after turn."""
    asked = [Message(role="user", content="Look around and tell me what you see. " * 8)]
    # Every turn in other words: a renderer knows texts again that it has seen.
    rooms = [
        " ".join(f"Room {turn}.{n} has a door and a lamp." for n in range(6))
        for turn in range(n_turns)
    ]
    n_observed = [[Message(role="tool", content=room)] for room in rooms]
    n_sampled = renderer.write(ACTION)
    start = process_time()
    n_tokens = len(renderer.open(asked, ()))
    for turn in range(n_turns):
        renderer.parse(n_sampled)
        n_tokens += len(n_sampled) + len(renderer.join(n_sampled[-1], n_observed[turn]) or ())
    return n_tokens, process_time() - start


def rendering_lines() -> list[str]:
    from skyfleet.chat.renderers import make_renderer
    from skyfleet.models.tiny import train_tokenizer

    tokenizer = train_tokenizer([], vocab_size=300)
    lines = ["| turns | tokens | CPU ms | µs a token |", "| --- | --- | --- | --- |"]
    for n_turns in (10, 40, 160, 640):
        # A renderer of its own each time, with nothing to know again.
        measured = [rendered(make_renderer(tokenizer), n_turns) for _ in range(5)]
        n_tokens, seconds = measured[0][0], median(seconds for _, seconds in measured)
        each = 1e6 * seconds / n_tokens
        lines.append(f"| {n_turns} | {n_tokens} | {1e3 * seconds:.1f} | {each:.2f} |")
    return lines


def latency_line(n_episodes: int, n_turns: int, seconds: float) -> str:
    engine = ScriptedEngine(seconds=seconds)
    start = perf_counter()
    asyncio.run(played(n_episodes, n_turns, engine))
    rate = n_episodes * n_turns / (perf_counter() - start)
    percentiles = [1e3 * latency for latency in quantiles(engine.latencies, n=100)]
    return (
        f"from a completion to the next request, {rate:,.0f} turns a second asked for: "
        f"median {percentiles[49]:.1f} ms, p99 {percentiles[98]:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.1, help="The engine's time for a turn.")
    asked = parser.parse_args()
    n_turns = asked.episodes * asked.turns

    costs = [
        asyncio.run(played(asked.episodes, asked.turns, ScriptedEngine(seconds=0)))
        for _ in range(5)
    ]
    print(f"Python {python_version()} on {machine()}, {asked.episodes} episodes at once")
    print(f"turns per CPU-second: {n_turns / median(costs):,.0f} (median of 5)")
    print(latency_line(asked.episodes, asked.turns, asked.seconds))
    gc.disable()
    print(latency_line(asked.episodes, asked.turns, asked.seconds), "without garbage collection")
    gc.enable()
    print("\n".join(rendering_lines()))


if __name__ == "__main__":
    main()
