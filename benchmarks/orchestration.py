"""CPU cost and latency of the agent loop, with an engine and an environment that cost nothing.

Turns per CPU-second include everything between two completions except rendering: the renderer
returns fixed tokens. Latency is the time from when a completion is due to the same episode's next
request, while many episodes run and the engine delays its answers. Rendering is timed separately.
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


class PrerenderedTokens:
    """A renderer that returns fixed tokens."""

    stop_token_ids: tuple[int, ...] = (0,)

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return [5] * PROMPT_TOKENS

    def render_continuation(self, last_token: int, messages: Sequence[Message]) -> list[int] | None:
        return [6] * REPLY_TOKENS

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        return ACTION

    def render_completion(self, message: Message) -> list[int]:
        return [7] * TURN_TOKENS

    def text(self, token_ids: Sequence[int]) -> str:
        return ""


class ScriptedEngine:
    """Returns a fixed completion after about `seconds`; records the latency of the next request."""

    policy_version = 0

    def __init__(self, *, seconds: float) -> None:
        self.latencies: list[float] = []
        self._seconds, self._rng = seconds, Random(0)
        self._due: dict[str, float] = {}
        self._completion = Completion(
            token_ids=(7,) * TURN_TOKENS,
            logprobs=(-0.5,) * TURN_TOKENS,
            finish="stop",
            policy_version=0,
        )

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        if session in self._due:
            self.latencies.append(perf_counter() - self._due[session])
        seconds = self._seconds * self._rng.uniform(0.5, 1.5)
        # Counted from when it is due, so that a late event loop counts, too.
        self._due[session] = perf_counter() + seconds
        await asyncio.sleep(seconds)
        return self._completion

    async def release(self, session: str) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class EndlessEnv:
    """Replies to every action and never ends."""

    async def reset(self) -> Observation:
        return Observation(messages=(Message(role="user", content="Look around."),))

    async def step(self, action: Message) -> Step:
        return Step(messages=(REPLY,))

    async def grade(self) -> Grade | None:
        return Grade(reward=0.0, success=False)

    async def close(self) -> None: ...


async def open_env(task: Task) -> Env:
    return EndlessEnv()


async def run_episodes(n_episodes: int, n_turns: int, engine: ScriptedEngine) -> float:
    """CPU-seconds of `n_episodes` concurrent episodes."""
    tasks = [Task(key=f"t{i}", env_key="room", prompt="?") for i in range(n_episodes)]
    limits = Limits(max_turns=n_turns, max_input_length=1 << 30, trajectory_timeout_seconds=900)

    def policy(task: Task, prompt: Observation, session: str) -> TokenConversation:
        return TokenConversation(
            prompt, engine=engine, renderer=PrerenderedTokens(), sampling=SAMPLING, session=session
        )

    start = process_time()
    groups = await collect(tasks, open_env, policy, limits, n_samples=1, max_concurrent=n_episodes)
    seconds = process_time() - start
    assert sum(len(t.turns) for group in groups for t in group.trajectories) == n_episodes * n_turns
    return seconds


def render_conversation(renderer: Renderer, n_turns: int) -> tuple[int, float]:
    """Tokens and CPU-seconds of rendering one conversation turn by turn."""
    prompt = [Message(role="user", content="Look around and tell me what you see. " * 8)]
    # Every turn has its own text, because a renderer caches texts.
    rooms = [
        " ".join(f"Room {turn}.{n} has a door and a lamp." for n in range(6))
        for turn in range(n_turns)
    ]
    observations = [[Message(role="tool", content=room)] for room in rooms]
    completion = renderer.render_completion(ACTION)
    start = process_time()
    n_tokens = len(renderer.render_prompt(prompt, ()))
    for turn in range(n_turns):
        renderer.parse(completion)
        n_tokens += len(completion) + len(
            renderer.render_continuation(completion[-1], observations[turn]) or ()
        )
    return n_tokens, process_time() - start


def measure_rendering() -> list[str]:
    from skyfleet.chat.renderers import make_renderer
    from skyfleet.models.tiny import train_tokenizer

    tokenizer = train_tokenizer([], vocab_size=300)
    lines = ["| turns | tokens | CPU ms | µs per token |", "| --- | --- | --- | --- |"]
    for n_turns in (10, 40, 160, 640):
        # A new renderer per measurement, with an empty cache.
        measured = [render_conversation(make_renderer(tokenizer), n_turns) for _ in range(5)]
        n_tokens, seconds = measured[0][0], median(seconds for _, seconds in measured)
        per_token = 1e6 * seconds / n_tokens
        lines.append(f"| {n_turns} | {n_tokens} | {1e3 * seconds:.1f} | {per_token:.2f} |")
    return lines


def measure_latency(n_episodes: int, n_turns: int, seconds: float) -> str:
    engine = ScriptedEngine(seconds=seconds)
    start = perf_counter()
    asyncio.run(run_episodes(n_episodes, n_turns, engine))
    rate = n_episodes * n_turns / (perf_counter() - start)
    percentiles = [1e3 * latency for latency in quantiles(engine.latencies, n=100)]
    return (
        f"from a completion to the next request, {rate:,.0f} turns per second: "
        f"median {percentiles[49]:.1f} ms, p99 {percentiles[98]:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.1, help="Mean seconds per completion.")
    options = parser.parse_args()
    n_turns = options.episodes * options.turns

    costs = [
        asyncio.run(run_episodes(options.episodes, options.turns, ScriptedEngine(seconds=0)))
        for _ in range(5)
    ]
    print(f"Python {python_version()} on {machine()}, {options.episodes} episodes at once")
    print(f"turns per CPU-second: {n_turns / median(costs):,.0f} (median of 5)")
    print(measure_latency(options.episodes, options.turns, options.seconds))
    gc.disable()
    print(
        measure_latency(options.episodes, options.turns, options.seconds),
        "without garbage collection",
    )
    gc.enable()
    print("\n".join(measure_rendering()))


if __name__ == "__main__":
    main()
