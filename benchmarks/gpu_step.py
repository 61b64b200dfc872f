"""W1: one GRPO step on one GPU, skyfleet and TRL with `generate` or with colocated vLLM.

SmolLM2-135M in bfloat16, 64 prompts x 8 samples, prompts of 256 tokens, 128 new tokens each (no
token ends a turn), one optimiser step, no KL. Every side gets the same prompts and the same reward.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import torch

from skyfleet.algorithms.advantages import grpo
from skyfleet.algorithms.credit_assignment import assign_credit
from skyfleet.algorithms.losses.ppo import ppo_clip
from skyfleet.algorithms.reduction import token_mean
from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.tokenizer import PromptEncoder
from skyfleet.engines.cuda.engine import CudaEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation, Step
from skyfleet.learner.optimizer import OptimizerSettings
from skyfleet.learner.single_device import LearnerSettings, SingleDeviceLearner
from skyfleet.models.decoder import Decoder
from skyfleet.models.loading import LoadedModel, load_model, save_model
from skyfleet.rollouts.conversation import TokenConversation
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.tasks.task import Grade, Task
from skyfleet.trainer.training_run import tuned_gc

N_PROMPTS, N_SAMPLES, PROMPT_LENGTH, NEW_TOKENS = 64, 8, 256, 128
LR, EPS_CLIP = 1e-6, 0.2
WARM_UP_STEPS = 2
PEAK_FLOPS, PEAK_BYTES = 790e12, 4.3e12


def make_prompts(tokenizer: Any) -> list[str]:
    """Prompts of 256 one-token words, so that every side gets the same 256 tokens."""
    words = sorted(
        w[1:]
        for w in tokenizer.get_vocab()
        if w.startswith("Ġ") and w[1:].isalpha() and w[1:].isascii()
    )
    rng = Random(0)
    return ["".join(f" {w}" for w in rng.sample(words, PROMPT_LENGTH)) for _ in range(N_PROMPTS)]


def reward(answer: str) -> float:
    return len(set(answer)) / 100


class PlainRenderer:
    """Renders the prompt text without a chat template."""

    stop_token_ids = ()

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._encode = tokenizer, PromptEncoder(tokenizer)

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return self._encode([messages[-1].text])

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec]) -> Message:
        return Message(role="assistant", content=self._tokenizer.decode(token_ids))


class OneAnswer:
    def __init__(self, task: Task) -> None:
        self._task, self._answer = task, ""

    async def reset(self) -> Observation:
        return Observation(messages=(Message(role="user", content=self._task.prompt),), tools=())

    async def step(self, action: Message) -> Step:
        self._answer = action.text
        return Step(messages=(), done=True)

    async def grade(self) -> Grade:
        return Grade(reward=reward(self._answer), success=False)

    async def close(self) -> None: ...


def compute_minimum_seconds(module: Any) -> dict[str, float]:
    """Lower bounds from peak FLOP/s and bandwidth: one prefill per prompt, logits of new tokens."""
    head = module.lm_head.weight.numel()  # tied to the embedding
    body = sum(p.numel() for p in module.parameters()) - head
    n_new = N_PROMPTS * N_SAMPLES * NEW_TOKENS
    flops = 2 * (body * (N_PROMPTS * PROMPT_LENGTH + n_new) + head * n_new)
    return {
        # Every decoding step reads the weights once.
        "rollout": NEW_TOKENS * 2 * (body + head) / PEAK_BYTES + flops / PEAK_FLOPS,
        "learn": 3 * flops / PEAK_FLOPS,
    }


def build_engine_and_learner(loaded: LoadedModel) -> tuple[CudaEngine, SingleDeviceLearner]:
    """Build both over the same tensors."""
    decoder = Decoder(loaded.module, max_positions=PROMPT_LENGTH + NEW_TOKENS)
    engine = CudaEngine(
        decoder,
        decode_text=loaded.tokenizer.decode,
        max_num_seqs=N_PROMPTS * N_SAMPLES,
        capacity=PROMPT_LENGTH + NEW_TOKENS,
        max_num_batched_tokens=N_PROMPTS * PROMPT_LENGTH,
    )
    optimizer = OptimizerSettings(lr=LR)
    learner = SingleDeviceLearner(
        decoder,
        LearnerSettings(
            optimizer=optimizer,
            warm_start_optimizer=optimizer,
            policy_loss=partial(ppo_clip, eps_clip_low=EPS_CLIP, eps_clip_high=EPS_CLIP),
            reduce=token_mean,
            temperature=1.0,
            policy_mini_batch_size=N_PROMPTS,
            max_tokens_per_microbatch=N_PROMPTS * N_SAMPLES * (PROMPT_LENGTH + NEW_TOKENS) // 2,
        ),
        save_policy=lambda _: None,
        load_policy=lambda _: None,
    )
    return engine, learner


async def measure_skyfleet(
    loaded: LoadedModel, engine: CudaEngine, learner: SingleDeviceLearner, steps: int
) -> dict[str, Any]:
    renderer: Any = PlainRenderer(loaded.tokenizer)
    tasks = [
        Task(key=f"w1-{index}", prompt=prompt, env_key="w1")
        for index, prompt in enumerate(make_prompts(loaded.tokenizer))
    ]
    assert {
        len(renderer.render_prompt([Message(role="user", content=t.prompt)], ())) for t in tasks
    } == {PROMPT_LENGTH}
    limits = Limits(max_turns=1, max_input_length=PROMPT_LENGTH, trajectory_timeout_seconds=900)

    async def open_env(task: Task) -> OneAnswer:
        return OneAnswer(task)

    rows: list[dict[str, float]] = []
    for step in range(WARM_UP_STEPS + steps):
        sampling = SamplingParams(max_generate_length=NEW_TOKENS, seed=step)

        def policy(
            task: Task, observation: Observation, session: str, sampling: SamplingParams = sampling
        ) -> TokenConversation:
            return TokenConversation(
                observation, engine=engine, renderer=renderer, sampling=sampling, session=session
            )

        start = perf_counter()
        groups = await collect(
            tasks, open_env, policy, limits, n_samples=N_SAMPLES, max_concurrent=512
        )
        collected = perf_counter()
        samples = assign_credit(groups, grpo)
        assigned = perf_counter()
        report = await learner.step(samples)
        engine.policy_version = report.policy_version
        torch.cuda.synchronize()
        end = perf_counter()
        assert {s.n_action_tokens for s in samples} == {NEW_TOKENS}
        rows.append(
            {
                "step": end - start,
                "rollout": collected - start,
                "credit": assigned - collected,
                "learn": end - assigned,
                "gap": report.metrics["policy/rollout_train_logprobs_abs_diff_mean"],
            }
        )
    measured = rows[WARM_UP_STEPS:]
    minimum = compute_minimum_seconds(loaded.module)
    phases = {name: round(median(row[name] for row in measured), 4) for name in measured[0]}
    return {
        "side": "skyfleet",
        **phases,
        "floor": {name: round(seconds, 4) for name, seconds in minimum.items()},
        "share_of_floor": {
            name: round(seconds / phases[name], 3) for name, seconds in minimum.items()
        },
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }


def measure_trl(folder: Path, steps: int, *, use_vllm: bool) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoTokenizer, ProgressCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            ends.append(perf_counter())

    def rewards(completions: list[str], **_: Any) -> list[float]:
        return [reward(completion) for completion in completions]

    ignore_eos = {"ignore_eos": True} if use_vllm else {"min_new_tokens": NEW_TOKENS}
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=str(folder),
            reward_funcs=rewards,
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": make_prompts(tokenizer)}),
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=output,
                max_steps=WARM_UP_STEPS + steps,
                model_init_kwargs={"dtype": "bfloat16"},
                bf16=True,
                per_device_train_batch_size=128,
                gradient_accumulation_steps=N_PROMPTS * N_SAMPLES // 128,
                num_generations=N_SAMPLES,
                max_completion_length=NEW_TOKENS,
                generation_kwargs=ignore_eos,
                learning_rate=LR,
                epsilon=EPS_CLIP,
                beta=0.0,
                gradient_checkpointing=False,
                use_vllm=use_vllm,
                vllm_mode="colocate",
                vllm_gpu_memory_utilization=0.15,
                vllm_max_model_length=PROMPT_LENGTH + NEW_TOKENS,
                logging_strategy="steps",
                logging_steps=1,
                report_to=[],
            ),
        )
        trainer.remove_callback(ProgressCallback)
        with tuned_gc():
            trainer.train()
    row = trainer.state.log_history[-2]
    assert row["completions/mean_length"] == NEW_TOKENS, row
    return {
        "side": "TRL, vLLM" if use_vllm else "TRL, generate",
        "step": round(median(b - a for a, b in pairwise(ends[WARM_UP_STEPS - 1 :])), 3),
        "gap": row.get("sampling/sampling_logp_difference/mean"),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=["skyfleet", "trl-generate", "trl-vllm"], required=True)
    parser.add_argument(
        "--steps", type=int, default=5, help="number of measured steps; the output is their median"
    )
    options = parser.parse_args()
    device = torch.device("cuda" if options.side == "skyfleet" else "cpu")
    loaded = load_model("smollm2", dtype=torch.bfloat16, device=device, config_kwargs={})
    if options.side == "skyfleet":
        engine, learner = build_engine_and_learner(loaded)
        with tuned_gc():  # as in `skyfleet train`, after set-up
            row = asyncio.run(measure_skyfleet(loaded, engine, learner, options.steps))
    else:
        with tempfile.TemporaryDirectory() as folder:
            save_model(loaded, Path(folder))
            row = measure_trl(Path(folder), options.steps, use_vllm=options.side == "trl-vllm")
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
