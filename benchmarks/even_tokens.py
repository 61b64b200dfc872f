"""How long GRPO takes to learn to sample even token ids: skyfleet beside TRL, as docs/benchmarks.md shows.

An episode is 32 tokens after a prompt of 8; its reward is the share of even ids among them. Both
sides get the same random weights (a two-layer, 128-wide Qwen3 over 258 ids, float32), the same four
prompts with 8 rollouts each, AdamW without decay at a constant rate, gradients clipped at norm 1,
one update per batch, advantages divided by the group's deviation, the clipped loss averaged over
tokens, no KL. One torch thread, `time.process_time` of the whole process.

The clock runs from the beginning of training to the moment a batch has been sampled and rewarded
whose mean reward is 0.95 or more, at most 100 steps. Both sides try the same learning rates on a
separate seed and keep the fastest one; five other seeds are the table. Ours runs the functions of
`skyfleet train` without its log and its archive: `collect`, `assign_credit`, `SingleDeviceLearner.step`.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from math import inf
from platform import machine, python_version, system
from statistics import fmean, median
from time import process_time
from typing import Any, NamedTuple

os.environ |= {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from skyfleet.algorithms.advantages import grpo
from skyfleet.algorithms.credit_assignment import assign_credit
from skyfleet.algorithms.losses.ppo import ppo_clip
from skyfleet.algorithms.reduction import token_mean
from skyfleet.chat.message import Message
from skyfleet.chat.transcript import Completion
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation, Step
from skyfleet.learner.optimizer import OptimizerSettings
from skyfleet.learner.single_device import LearnerSettings, SingleDeviceLearner
from skyfleet.models.decoder import Decoder
from skyfleet.models.tiny import build_tiny
from skyfleet.rollouts.conversation import TokenConversation
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.tasks.task import Grade, Task

N_IDS, PROMPT_LENGTH, LENGTH = 256, 8, 32
N_PROMPTS, N_SAMPLES = 4, 8
N_ROLLOUTS = N_PROMPTS * N_SAMPLES
ENOUGH, MAX_STEPS = 0.95, 100
EPS_CLIP = 0.2
RATES = (1e-3, 3e-3, 1e-2)
"""At 3e-2 and more both sides need two to four updates, and chance decides."""
TRIAL_SEED, SEEDS = 0, (1, 2, 3, 4, 5)


class Learned(NamedTuple):
    seconds: float
    """CPU; infinite where the reward was not reached."""
    steps: int
    """Updates before it was reached."""


Learn = Callable[[float, int], Learned]


def make_tokenizer() -> Any:
    """Every id is a word that says its number, so that an environment can count even ones."""
    words = {str(number): number for number in range(N_IDS)}
    backend = Tokenizer(models.WordLevel(words | {"<end>": N_IDS, "<pad>": N_IDS + 1}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


TOKENIZER = make_tokenizer()
PROMPTS = [
    " ".join(str((17 * i + 31 * place) % N_IDS) for place in range(PROMPT_LENGTH))
    for i in range(N_PROMPTS)
]


def make_model(seed: int) -> Any:
    return build_tiny(TOKENIZER, {"num_hidden_layers": 2}, seed=seed)


def share_even(token_ids: Sequence[int]) -> float:
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)


class Numbers:
    """Messages are words of the tokenizer, and nothing else is written around them."""

    stop_token_ids: tuple[int, ...] = ()

    def render_prompt(self, messages: Sequence[Message], tools: object) -> list[int]:
        token_ids: list[int] = TOKENIZER.encode(messages[-1].text)
        return token_ids

    def render_continuation(self, last_token: int, messages: Sequence[Message]) -> None:
        return None

    def parse(self, token_ids: Sequence[int], tools: object = ()) -> Message:
        return Message(role="assistant", content=self.text(token_ids))

    def render_completion(self, message: Message) -> list[int]:
        token_ids: list[int] = TOKENIZER.encode(message.text)
        return token_ids

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(TOKENIZER.convert_ids_to_tokens(list(token_ids)))


class EvenEnv:
    def __init__(self, task: Task) -> None:
        self._observation = Observation(messages=(Message(role="user", content=task.prompt),))
        self._sampled: list[int] = []

    async def reset(self) -> Observation:
        return self._observation

    async def step(self, action: Message) -> Step:
        self._sampled = TOKENIZER.convert_tokens_to_ids(action.text.split())
        return Step(done=True)

    async def grade(self) -> Grade:
        assert len(self._sampled) == LENGTH
        return Grade(reward=share_even(self._sampled), success=False)

    async def close(self) -> None: ...


async def open_env(task: Task) -> EvenEnv:
    return EvenEnv(task)


class FullTurns(EmbeddedEngine):
    """A turn is over when it has its tokens, and was not cut short."""

    async def generate(self, token_ids: Any, sampling: Any, *, session: str) -> Completion:
        completion = await super().generate(token_ids, sampling, session=session)
        return replace(completion, finish="stop")


def learn_with_skyfleet(lr: float, seed: int) -> Learned:
    return asyncio.run(_learn(lr, seed))


async def _learn(lr: float, seed: int) -> Learned:
    decoder = Decoder(make_model(seed), max_positions=PROMPT_LENGTH + LENGTH)
    numbers, limits = (
        Numbers(),
        Limits(max_turns=1, max_input_length=PROMPT_LENGTH, trajectory_timeout_seconds=0),
    )
    engine = FullTurns(
        decoder,
        decode_text=numbers.text,
        max_num_seqs=N_ROLLOUTS,
        capacity=PROMPT_LENGTH + LENGTH,
    )
    learner = make_learner(decoder, lr)
    tasks = [Task(key=str(i), env_key="even", prompt=p) for i, p in enumerate(PROMPTS)]
    start = process_time()
    for step in range(MAX_STEPS + 1):
        sampling = SamplingParams(max_generate_length=LENGTH, seed=seed * 1_000 + step)

        def policy(
            task: Task, observation: Observation, session: str, sampling: SamplingParams = sampling
        ) -> TokenConversation:
            return TokenConversation(
                observation, engine=engine, renderer=numbers, sampling=sampling, session=session
            )

        groups = await collect(
            tasks, open_env, policy, limits, n_samples=N_SAMPLES, max_concurrent=N_ROLLOUTS
        )
        if fmean(reward for group in groups for reward in group.rewards) >= ENOUGH:
            return Learned(process_time() - start, step)
        report = await learner.step(assign_credit(groups, grpo))
        engine.policy_version = report.policy_version
    return Learned(inf, MAX_STEPS)


def make_learner(decoder: Decoder, lr: float) -> SingleDeviceLearner:
    optimizer = OptimizerSettings(lr=lr, weight_decay=0.0, max_grad_norm=1.0)
    settings = LearnerSettings(
        optimizer=optimizer,
        warm_start_optimizer=optimizer,
        policy_loss=partial(ppo_clip, eps_clip_low=EPS_CLIP, eps_clip_high=EPS_CLIP),
        reduce=token_mean,
        temperature=1.0,
        policy_mini_batch_size=N_PROMPTS,
        max_tokens_per_microbatch=N_ROLLOUTS * (PROMPT_LENGTH + LENGTH),
    )
    return SingleDeviceLearner(
        decoder, settings, save_policy=lambda _: None, load_policy=lambda _: None
    )


def learn_with_trl(lr: float, seed: int) -> Learned:
    """`GRPOTrainer`, its logging switched off; nothing ends a completion early."""
    from datasets import Dataset
    from transformers import ProgressCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    reached: list[Learned] = []
    began = [0.0]

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            began[0] = process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = bool(reached)

    def rewards(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
        assert {len(ids) for ids in completion_ids} == {LENGTH}
        shares = list(map(share_even, completion_ids))
        if fmean(shares) >= ENOUGH and not reached:
            reached.append(Learned(process_time() - began[0], trainer_state.global_step))
        return shares

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=make_model(seed),
            reward_funcs=rewards,
            processing_class=TOKENIZER,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=folder,
                max_steps=MAX_STEPS + 1,
                per_device_train_batch_size=N_ROLLOUTS,
                num_generations=N_SAMPLES,
                max_completion_length=LENGTH,
                generation_kwargs={"min_new_tokens": LENGTH},
                learning_rate=lr,
                lr_scheduler_type="constant",
                weight_decay=0.0,
                max_grad_norm=1.0,
                epsilon=EPS_CLIP,
                seed=seed,
                bf16=False,
                gradient_checkpointing=False,
                use_cpu=True,
                logging_strategy="no",
                save_strategy="no",
            ),
        )
        trainer.remove_callback(ProgressCallback)
        trainer.train()
    return reached[0] if reached else Learned(inf, MAX_STEPS)


def row(name: str, learn: Learn) -> str:
    lr = min(RATES, key=lambda rate: learn(rate, TRIAL_SEED).seconds)
    runs = [learn(lr, seed) for seed in SEEDS]
    each = [run.seconds / (run.steps + 1) for run in runs]
    cells = (
        name,
        f"{lr:g}",
        _spread([run.seconds for run in runs], "{:.2f}"),
        _spread([run.steps for run in runs], "{:.0f}"),
        f"{median(each):.3f}",
    )
    return f"| {' | '.join(cells)} |"


def _spread(values: Sequence[float], form: str) -> str:
    """`2.10 (1.90 to 2.40)`"""
    middle, low, high = (form.format(x) for x in (median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def main() -> None:
    torch.set_num_threads(1)
    sides: dict[str, Learn] = {"skyfleet": learn_with_skyfleet}
    if find_spec("trl"):
        sides["TRL"] = learn_with_trl
    rows = [row(name, learn) for name, learn in sides.items()]
    packages = [name for name in ("torch", "transformers", "trl") if find_spec(name)]
    named = ", ".join(f"{name} {version(name)}" for name in packages)
    print(f"`python benchmarks/even_tokens.py` on {date.today()}: {system()} {machine()},")
    print(f"Python {python_version()}, {named}.\n")
    print("| | learning rate | CPU-seconds to 0.95 | updates | CPU-seconds per step |")
    print("|---|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
