"""Multi-turn episodes on one GPU: 512 of 8 turns in the shipped worlds, our engine beside vLLM.

SmolLM2-135M in bfloat16 samples 48 tokens per turn; no stop token ends a turn early. An untrained
model calls few tools, so the world executes the next call of the reference solution, whatever was
sampled. Prompts therefore grow as in real episodes, and both sides run the same turns. Each side is a
separate process and runs twice with a seed on every request, as in training, and twice without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from skyfleet.chat.message import Message, ToolCall
from skyfleet.chat.renderers import make_renderer
from skyfleet.chat.transcript import Completion
from skyfleet.engines.cuda.engine import CudaEngine
from skyfleet.engines.engine import Engine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.engines.vllm_controller import VllmSettings
from skyfleet.engines.vllm_engine import open_vllm_engine
from skyfleet.envs.env import Env, Observation, Step, close_env
from skyfleet.models.decoder import Decoder
from skyfleet.models.loading import load_model, save_model
from skyfleet.rollouts.conversation import TokenConversation
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.tasks.task import Grade, Task
from skyfleet.trainer.training_run import tuned_gc
from skyfleet.worlds.catalog import generate_world_tasks, open_world

WORLDS = ("booking", "github", "reddit", "zillow", "hubspot", "dropbox", "fira", "google-maps")
N_SAMPLES, N_TURNS, N_NEW, CAPACITY = 8, 8, 48, 4096
MAX_NUM_BATCHED_TOKENS = 16_384


class Directed:
    """A world in which the next call of the reference solution is made, whatever was sampled."""

    def __init__(self, env: Env, task: Task) -> None:
        self._env, self._task = env, task
        self._calls = islice(cycle(task.solution), N_TURNS)

    async def reset(self) -> Observation:
        return await self._env.reset()

    async def step(self, action: Message) -> Step:
        call = next(self._calls)
        tool_call = ToolCall(id="call_0", name=call.name, arguments=call.arguments)
        step = await self._env.step(Message(role="assistant", tool_calls=(tool_call,)))
        if step.done:  # an answer was given, which ends a world: the next call begins it anew
            await close_env(self._env)
            self._env = await open_world(self._task)
            await self._env.reset()
        return Step(messages=step.messages, done=False)

    async def grade(self) -> Grade:
        return Grade(reward=0.0, success=False)

    async def close(self) -> None:
        await close_env(self._env)


class Counted:
    """An engine, and how many tokens it was given to read."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.n_prompt = self.n_sampled = 0
        self.policy_version = 0

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        completion = await self._engine.generate(token_ids, sampling, session=session)
        self.n_prompt += len(token_ids)
        self.n_sampled += len(completion.token_ids)
        return Completion(
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            finish="stop",
            policy_version=completion.policy_version,
        )

    async def release(self, session: str) -> None:
        await self._engine.release(session)

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class CachedTokens:
    """Asks vLLM for every request how much of its prompt was cached."""

    def __init__(self, llm: Any) -> None:
        self._generate, self.total = llm.generate, 0
        llm.generate = self

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        async for output in self._generate(*args, **kwargs):
            if output.finished:
                self.total += output.num_cached_tokens or 0
            yield output


async def play(
    engine: Counted, renderer: Any, tasks: Sequence[Task], time: int, *, seeded: bool
) -> float:
    sampling = SamplingParams(max_generate_length=N_NEW, seed=time if seeded else None)
    limits = Limits(max_turns=N_TURNS, max_input_length=CAPACITY, trajectory_timeout_seconds=900)

    async def open_env(task: Task) -> Directed:
        return Directed(await open_world(task), task)

    def policy(task: Task, observation: Observation, session: str) -> TokenConversation:
        return TokenConversation(
            observation,
            engine=engine,
            renderer=renderer,
            sampling=sampling,
            session=f"{time}/{session}",
        )

    start = perf_counter()
    groups = await collect(
        tasks,
        open_env,
        policy,
        limits,
        n_samples=N_SAMPLES,
        max_concurrent=len(tasks) * N_SAMPLES,
    )
    seconds = perf_counter() - start
    turns = {len(t.turns) for group in groups for t in group.trajectories}
    assert turns == {N_TURNS}, turns
    return seconds


async def measured(
    side: str, n_tasks: int, device: str, cache_gib: float
) -> AsyncIterator[dict[str, Any]]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    loaded = load_model("smollm2", dtype=dtype, device=torch.device(device), config_kwargs={})
    renderer = make_renderer(loaded.tokenizer)
    tasks = [
        task
        for name in WORLDS
        for task in generate_world_tasks(name, split="train", count=n_tasks // len(WORLDS))
    ]
    n_episodes = len(tasks) * N_SAMPLES
    if side == "vllm":
        with tempfile.TemporaryDirectory() as folder:
            save_model(loaded, Path(folder))
            settings = VllmSettings(
                max_model_len=CAPACITY,
                max_num_seqs=n_episodes,
                max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
                gpu_memory_utilization=0.1,
                engine_init_kwargs={
                    "kv_cache_memory_bytes": int(cache_gib * 2**30),
                    "compilation_config": {"max_cudagraph_capture_size": n_episodes},
                },
            )
            vllm = await open_vllm_engine(folder, settings, decode_text=renderer.text)
        cached = CachedTokens(vllm._llm)
        inner: Any = vllm
    else:
        inner = CudaEngine(
            Decoder(loaded.module, max_positions=CAPACITY),
            decode_text=renderer.text,
            max_num_seqs=n_episodes,
            capacity=CAPACITY,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            memory_bytes=int(cache_gib * 2**30) if device == "cuda" else 1 << 30,
        )
    engine = Counted(inner)
    await play(engine, renderer, tasks, 0, seeded=True)
    for time, seeded in enumerate([True, False, False, True], start=1):
        # As after a weight update: nothing of the time before is left to be found.
        inner.policy_version = time
        n_prompt, n_sampled = engine.n_prompt, engine.n_sampled
        read = cached.total if side == "vllm" else inner.tokens_computed
        with tuned_gc():  # as in `skyfleet train`, once everything is set up
            seconds = await play(engine, renderer, tasks, time, seeded=seeded)
        n_prompt, n_sampled = engine.n_prompt - n_prompt, engine.n_sampled - n_sampled
        if side == "vllm":
            from_cache = cached.total - read
        else:
            from_cache = n_prompt - (inner.tokens_computed - read - n_sampled)
        yield {
            "side": side,
            "seeds": seeded,
            "episodes_a_minute": round(n_episodes * 60 / seconds),
            "seconds": round(seconds, 2),
            "sampled_tokens_a_second": round(n_sampled / seconds),
            "prompt_tokens": n_prompt,
            "share_from_cache": round(from_cache / n_prompt, 4),
        }
    if side == "vllm":
        await vllm.close()


async def report(side: str, n_tasks: int, device: str, cache_gib: float) -> None:
    async for row in measured(side, n_tasks, device, cache_gib):
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=["embedded", "vllm"], required=True)
    parser.add_argument("--tasks", type=int, default=64, help="of 8 attempts each")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cache-gib", type=float, default=30, help="keys and values of either")
    options = parser.parse_args()
    asyncio.run(report(options.side, options.tasks, options.device, options.cache_gib))


if __name__ == "__main__":
    main()
