"""The learner trains on exactly the tokens and logprobs that the engine sampled."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import torch

from skyfleet.algorithms.credit_assignment import assign_credit
from skyfleet.algorithms.sample import Sample
from skyfleet.chat.chatml import ChatMLRenderer
from skyfleet.chat.message import Message
from skyfleet.chat.renderers import make_renderer
from skyfleet.chat.transcript import Completion
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation, Step
from skyfleet.learner.batching import action_logprobs, pack
from skyfleet.models.decoder import Decoder
from skyfleet.models.tiny import build_tiny, train_tokenizer
from skyfleet.rollouts.conversation import TokenConversation
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.tasks.task import Grade, Task
from skyfleet.trajectories.trajectory import Ending, Group
from skyfleet.worlds.catalog import WORLD_NAMES, generate_world_tasks, get_world
from skyfleet.worlds.env import WorldEnv

N_TASKS = 20
N_SAMPLES = 20
LIMITS = Limits(max_turns=3, max_input_length=520, trajectory_timeout_seconds=0)
DIMENSIONS = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}


class FailingWorld(WorldEnv):
    """A built-in environment that randomly fails, replies too long, ends early or cannot grade."""

    def __init__(self, task: Task, rng: Random) -> None:
        super().__init__(get_world(task.env_key), task)
        self._rng = rng

    async def step(self, action: Message) -> Step:
        await asyncio.sleep(0)  # let other episodes run first
        draw = self._rng.random()
        if draw < 0.03:
            raise OSError("injected")
        step = await super().step(action)
        if draw < 0.1:
            return replace(step, messages=(Message(role="user", content="no <|im_end|>\n" * 60),))
        return replace(step, done=step.done or draw > 0.95)

    async def grade(self) -> Grade:
        if self._rng.random() < 0.05:
            raise ValueError("injected")
        return Grade(reward=self._rng.random(), success=False)


@dataclass(slots=True)
class Recorder:
    """An engine that records its completions by session."""

    engine: EmbeddedEngine
    completions: dict[str, list[Completion]] = field(default_factory=lambda: defaultdict(list))
    policy_version: int = 0

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        completion = await self.engine.generate(token_ids, sampling, session=session)
        self.completions[session].append(completion)
        return completion

    async def release(self, session: str) -> None:
        await self.engine.release(session)

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


def random_sampling(rng: Random, renderer: ChatMLRenderer, temperature: float) -> SamplingParams:
    """Random settings per episode, except the temperature, which the learner must know."""
    return SamplingParams(
        max_generate_length=rng.choice((1, 2, 8, 16)),
        temperature=temperature,
        stop=rng.choice(((), ("e",), ("<tool", "}}"), ("é\n",))),
        stop_token_ids=renderer.stop_token_ids,
        seed=rng.randrange(1000),
    )


def action_tokens(sample: Sample) -> list[tuple[int, float]]:
    triples = zip(sample.token_ids, sample.logprobs, sample.loss_mask, strict=True)
    return [(token, logprob) for token, logprob, is_action in triples if is_action]


def max_logprob_gap(decoder: Decoder, samples: Sequence[Sample], temperature: float) -> float:
    """The largest gap between a recorded logprob and the learner's."""
    gap = 0.0
    for batch in pack(samples, [1.0] * len(samples), max_tokens=16_384, device=decoder.device):
        with torch.no_grad():
            logprobs_N, _ = action_logprobs(
                decoder, batch, temperature=temperature, chunk_size=1024
            )
        gap = max(gap, float((logprobs_N - batch.behaviour_logprobs_N).abs().max()))
    return gap


async def run_episodes(
    tasks: Sequence[Task], decoder: Decoder, renderer: ChatMLRenderer, rng: Random
) -> tuple[list[Group], Recorder, float]:
    engine = EmbeddedEngine(
        decoder,
        decode_text=renderer.text,
        max_num_seqs=rng.choice((7, 24)),
        capacity=LIMITS.max_input_length + 16,
        max_num_batched_tokens=rng.choice((333, 8192)),
    )
    recorder, temperature = Recorder(engine), rng.uniform(0.5, 1.5)

    async def open_env(task: Task) -> FailingWorld:
        return FailingWorld(task, Random(rng.random()))

    def start(task: Task, observation: Observation, session: str) -> TokenConversation:
        return TokenConversation(
            observation,
            engine=recorder,
            renderer=renderer,
            sampling=random_sampling(rng, renderer, temperature),
            session=session,
        )

    groups = await collect(tasks, open_env, start, LIMITS, n_samples=N_SAMPLES, max_concurrent=32)
    return groups, recorder, temperature


async def test_the_learner_trains_on_exactly_the_tokens_the_engine_sampled() -> None:
    rng = Random(0)
    every = [t for name in WORLD_NAMES for t in generate_world_tasks(name, split="all", count=17)]
    texts = [task.prompt + str(task.solution) for task in every]
    tokenizer = train_tokenizer(texts, vocab_size=500)
    renderer = make_renderer(tokenizer)
    assert isinstance(renderer, ChatMLRenderer)
    n_episodes, n_tokens, endings = 0, 0, set[Ending]()
    for seed in range(N_TASKS // 5):
        model = build_tiny(tokenizer, DIMENSIONS, seed=seed)
        decoder = Decoder(model, max_positions=LIMITS.max_input_length + 16)
        tasks = rng.sample(every, 5)
        groups, recorder, temperature = await run_episodes(tasks, decoder, renderer, rng)
        samples: list[Sample] = []
        for group in groups:
            new_samples = iter(assign_credit([group], list))
            for trajectory in group.trajectories:
                n_episodes += 1
                endings.add(trajectory.ending)
                completions = recorder.completions[f"{trajectory.task_key}/{trajectory.sample}"]
                sampled = [
                    pair for c in completions for pair in zip(c.token_ids, c.logprobs, strict=True)
                ]
                if trajectory.grade is None or not sampled:
                    continue
                sample = next(new_samples)
                assert action_tokens(sample) == sampled
                samples.append(sample)
                n_tokens += len(sampled)
            assert next(new_samples, None) is None
        assert max_logprob_gap(decoder, samples, temperature) < 1e-5
    assert n_episodes == N_TASKS * N_SAMPLES == 400
    assert n_tokens > 2000
    assert endings == {
        Ending.DONE,
        Ending.MAX_TURNS,
        Ending.CONTEXT_FULL,
        Ending.LENGTH,
        Ending.FAILED,
    }
