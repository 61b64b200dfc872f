"""CPU-seconds of one GRPO step on one CPU core, skyfleet and TRL (table in docs/benchmarks.md).

Both sides get the same random weights, tokenizer, prompts and optimiser, and sample the same number
of tokens. A random model does not call tools. In a turn that should call one, the script samples as
usual and then replaces the sampled tokens by a tool call.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import cycle, islice, pairwise
from platform import machine, python_version, system
from statistics import median
from time import process_time
from typing import Any, NamedTuple

os.environ |= {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

import torch
from transformers.utils.chat_template_utils import get_json_schema

from skyfleet.algorithms.advantages import grpo
from skyfleet.algorithms.credit_assignment import assign_credit
from skyfleet.algorithms.losses.ppo import ppo_clip
from skyfleet.algorithms.reduction import token_mean
from skyfleet.chat.chatml import ChatMLRenderer
from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.tool_prompt import render_qwen_tools
from skyfleet.chat.transcript import Completion
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation, Step
from skyfleet.learner.optimizer import OptimizerSettings
from skyfleet.learner.single_device import LearnerSettings, SingleDeviceLearner
from skyfleet.metrics.rollout_metrics import episode_metrics
from skyfleet.models.decoder import Decoder
from skyfleet.models.tiny import build_tiny, train_tokenizer
from skyfleet.rollouts.conversation import TokenConversation
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.tasks.task import Grade, Task
from skyfleet.worlds.catalog import generate_world_tasks

N_PROMPTS, N_SAMPLES = 4, 4
N_ROLLOUTS = N_PROMPTS * N_SAMPLES
TURN_LENGTH, MAX_LENGTH = 64, 1024
"""Tokens sampled in every turn, and the maximum tokens per episode."""
LR, WEIGHT_DECAY, EPS_CLIP = 1e-6, 0.01, 0.2
WARM_UP_STEPS = 3


class Notes:
    """The tool environment in TRL's form: its public methods are the tools."""

    def reset(self, **_: object) -> None: ...

    def look_up(self, topic: str) -> str:
        """
        Read what the notes say about a topic.

        Args:
            topic: What to look for.
        """
        return f"The notes on {topic}: solved on Tuesday, waits for review."


# TRL puts the return type into the prompt; without it both prompts are equal.
del Notes.look_up.__annotations__["return"]
TOOL = ToolSpec(**get_json_schema(Notes.look_up)["function"])


def reward(answer: str) -> float:
    return len(set(answer)) / 100


class Workload:
    """The tokenizer, tasks, tools and model that both sides use."""

    def __init__(self, *, n_calls: int) -> None:
        tasks = generate_world_tasks("github", split="train", count=200)
        texts = [*(task.prompt for task in tasks), render_qwen_tools([TOOL])]
        self.tokenizer: Any = train_tokenizer(texts, vocab_size=2048)
        self.renderer = ChatMLRenderer(self.tokenizer)
        self.tasks = tasks[:N_PROMPTS]
        self.tools = (TOOL,) if n_calls else ()
        self.n_calls = n_calls
        """Tool calls per episode; one more turn gives the answer."""
        self.n_sampled = (n_calls + 1) * TURN_LENGTH

    def make_model(self) -> Any:
        return build_tiny(self.tokenizer, {"num_hidden_layers": 2}, seed=17)

    def render_prompt(self, task: Task) -> list[int]:
        return self.renderer.render_prompt([Message(role="user", content=task.prompt)], self.tools)

    def script_turn(self, prompt: Sequence[int], sampled: Sequence[int]) -> list[int]:
        """Tokens to use instead of `sampled`: a tool call; in the last turn `sampled` with an end."""
        n_done = list(prompt).count(self.tokenizer.convert_tokens_to_ids("<tool_response>"))
        if n_done == self.n_calls:
            return [*sampled[:-1], self.tokenizer.eos_token_id]
        call = ToolCall(id="", name=TOOL.name, arguments={"topic": f"topic {n_done}"})
        completions = self.renderer.render_completion(Message(role="assistant", tool_calls=(call,)))
        filler = self.tokenizer.encode(self.tasks[0].prompt)
        return [*islice(cycle(filler), TURN_LENGTH - len(completions)), *completions]


class CpuSeconds(NamedTuple):
    step: float
    rollout: float
    learn: float


class NotesEnv:
    def __init__(self, task: Task, tools: tuple[ToolSpec, ...]) -> None:
        question = Message(role="user", content=task.prompt)
        self._observation = Observation(messages=(question,), tools=tools)
        self._notes, self._answer = Notes(), ""

    async def reset(self) -> Observation:
        return self._observation

    async def step(self, action: Message) -> Step:
        self._answer = action.text
        results = [self._notes.look_up(**call.arguments) for call in action.tool_calls]
        replies = tuple(Message(role="tool", content=result) for result in results)
        return Step(messages=replies, done=not replies)

    async def grade(self) -> Grade:
        return Grade(reward=reward(self._answer), success=False)

    async def close(self) -> None: ...


class ScriptedEngine(EmbeddedEngine):
    """Samples every token, then replaces it as scripted; no stop token ends a turn early."""

    def __init__(self, workload: Workload, decoder: Decoder) -> None:
        text = workload.renderer.text
        super().__init__(decoder, decode_text=text, max_num_seqs=N_ROLLOUTS, capacity=MAX_LENGTH)
        self._script_turn = workload.script_turn
        self._scripts: dict[str, list[int]] = {}

    async def generate(self, token_ids: Any, sampling: Any, *, session: str) -> Completion:
        # -1 marks a token that stays as sampled.
        self._scripts[session] = self._script_turn(token_ids, [-1] * TURN_LENGTH)
        completion = await super().generate(token_ids, sampling, session=session)
        return replace(completion, finish="stop")

    def _append(self, request: Any, token: int, logprob: float) -> None:
        scripted = self._scripts[request.session][len(request.logprobs)]
        super()._append(request, token if scripted < 0 else scripted, logprob)


def make_learner(decoder: Decoder) -> SingleDeviceLearner:
    optimizer = OptimizerSettings(lr=LR, weight_decay=WEIGHT_DECAY)
    settings = LearnerSettings(
        optimizer=optimizer,
        warm_start_optimizer=optimizer,
        policy_loss=partial(ppo_clip, eps_clip_low=EPS_CLIP, eps_clip_high=EPS_CLIP),
        reduce=token_mean,
        temperature=1.0,
        policy_mini_batch_size=N_PROMPTS,
        max_tokens_per_microbatch=N_ROLLOUTS * MAX_LENGTH,
    )
    return SingleDeviceLearner(
        decoder, settings, save_policy=lambda _: None, load_policy=lambda _: None
    )


async def measure_skyfleet(workload: Workload, steps: int) -> CpuSeconds:
    """A step of `skyfleet train` without its log and its archive."""
    decoder = Decoder(workload.make_model(), max_positions=MAX_LENGTH)
    engine, learner = ScriptedEngine(workload, decoder), make_learner(decoder)
    sampling = SamplingParams(max_generate_length=TURN_LENGTH)
    limits = Limits(max_turns=9, max_input_length=MAX_LENGTH, trajectory_timeout_seconds=900)

    async def open_env(task: Task) -> NotesEnv:
        return NotesEnv(task, workload.tools)

    def policy(task: Task, observation: Observation, session: str) -> TokenConversation:
        return TokenConversation(
            observation,
            engine=engine,
            renderer=workload.renderer,
            sampling=sampling,
            session=session,
        )

    async def step() -> CpuSeconds:
        start = process_time()
        groups = await collect(
            workload.tasks, open_env, policy, limits, n_samples=N_SAMPLES, max_concurrent=N_ROLLOUTS
        )
        collected = process_time()
        row = episode_metrics(groups)
        samples = assign_credit(groups, grpo)
        assigned = process_time()
        engine.policy_version = (await learner.step(samples)).policy_version
        end = process_time()
        assert row["generate/min_assistant_tokens"] == workload.n_sampled
        assert row["environment/avg_tool_calls"] == workload.n_calls
        return CpuSeconds(step=end - start, rollout=collected - start, learn=end - assigned)

    costs = [await step() for _ in range(WARM_UP_STEPS + steps)]
    return CpuSeconds(*map(median, zip(*costs[WARM_UP_STEPS:], strict=True)))


def measure_trl(workload: Workload, steps: int) -> float:
    """Time between the ends of two steps of `GRPOTrainer`, with logging off."""
    from datasets import Dataset
    from transformers import ProgressCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_instruct_2507_chat_template

    workload.tokenizer.chat_template = qwen3_instruct_2507_chat_template
    prompts = [[{"role": "user", "content": task.prompt}] for task in workload.tasks]
    tools = [Notes.look_up] if workload.tools else None
    trl_prompts = workload.tokenizer.apply_chat_template(
        prompts, tools=tools, add_generation_prompt=True, return_dict=False
    )
    assert trl_prompts == list(map(workload.render_prompt, workload.tasks)), (
        "the two sides have different prompts"
    )
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(process_time())

    class ScriptedTrainer(GRPOTrainer):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            sampled, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            return list(map(workload.script_turn, prompt_ids, sampled)), logprobs

    def rewards(completions: list[Any], **_: Any) -> list[float]:
        return [reward(completion[-1]["content"]) for completion in completions]

    with tempfile.TemporaryDirectory() as folder:
        trainer = ScriptedTrainer(
            model=workload.make_model(),
            reward_funcs=rewards,
            processing_class=workload.tokenizer,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            environment_factory=Notes if workload.tools else None,
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=folder,
                max_steps=WARM_UP_STEPS + steps,
                per_device_train_batch_size=N_ROLLOUTS,
                num_generations=N_SAMPLES,
                max_completion_length=MAX_LENGTH,
                # A turn is shorter than an episode, and no token ends it early.
                generation_kwargs={"max_new_tokens": TURN_LENGTH, "min_new_tokens": TURN_LENGTH},
                learning_rate=LR,
                weight_decay=WEIGHT_DECAY,
                epsilon=EPS_CLIP,
                bf16=False,
                gradient_checkpointing=False,
                use_cpu=True,
                logging_strategy="no",
            ),
        )
        trainer.remove_callback(ProgressCallback)
        trainer.train()
    row = trainer.state.log_history[-1]
    assert row["completions/min_length"] == row["completions/max_length"] == workload.n_sampled
    assert row.get("tools/call_frequency", 0) == workload.n_calls
    return median(end - start for start, end in pairwise(ends[WARM_UP_STEPS - 1 :]))


def format_row(workload: Workload, steps: int) -> str:
    ours = asyncio.run(measure_skyfleet(workload, steps))
    name = (
        f"{workload.n_calls} tool calls, then an answer"
        if workload.tools
        else "no tools, one answer"
    )
    cells = [name, *(f"{seconds:.3f}" for seconds in (ours.step, ours.rollout, ours.learn))]
    theirs = measure_trl(workload, steps) if find_spec("trl") else None
    cells += [f"{theirs:.3f}", f"{ours.step / theirs:.2f}"] if theirs else ["not installed", ""]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=7, help="number of measured steps; the table shows medians"
    )
    steps: int = parser.parse_args().steps
    torch.set_num_threads(1)
    rows = [format_row(Workload(n_calls=n_calls), steps) for n_calls in (0, 3)]
    packages = [name for name in ("torch", "transformers", "trl") if find_spec(name)]
    print(
        f"`python benchmarks/cpu_step.py --steps {steps}` on {date.today()}: {system()} {machine()},"
    )
    print(
        f"Python {python_version()}, {', '.join(f'{name} {version(name)}' for name in packages)}.\n"
    )
    print("| CPU-seconds per step | skyfleet | its rollout | its learn | TRL | skyfleet / TRL |")
    print("|---|---|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
