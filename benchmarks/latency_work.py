"""What the modes of `benchmarks.gpu_latency` share: prompts, the model, a tool that takes time."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers.utils.chat_template_utils import get_json_schema

from skyfleet.chat.chatml import ChatMLRenderer
from skyfleet.chat.message import Message, ToolSpec
from skyfleet.envs.env import Observation, Step
from skyfleet.models.loading import LoadedModel, load_model
from skyfleet.models.tiny import build_tiny, train_tokenizer
from skyfleet.tasks.task import Grade, Task

MEAN_SECONDS, SIGMA = 0.2, 0.5
PROMPT_WORDS, RESULT_WORDS = 64, 16
LR, EPS_CLIP = 1e-6, 0.2
WARM_UP_STEPS = 2


def draw_latency(task: str, attempt: int, turn: int) -> float:
    """Seconds of a tool call; the mean of the distribution is MEAN_SECONDS."""
    mu = math.log(MEAN_SECONDS) - SIGMA**2 / 2
    return Random(f"{task}/{attempt}/{turn}").lognormvariate(mu, SIGMA)


def draw_reward(task: str, attempt: int) -> float:
    """A reward that varies within a group, so that every group is trained on."""
    return Random(f"reward/{task}/{attempt}").random()


class Work:
    """Sizes, prompts and the model, which are the same in every mode."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.n_tasks, self.n_samples = int(options.tasks), int(options.samples)
        self.n_turns, self.n_new = int(options.turns), int(options.new_tokens)
        self.scale = options.latency_scale
        self.device = torch.device(options.device)
        # TRL loads the weights itself, from a folder.
        self.load_device = torch.device("cpu") if options.child == "trl" else self.device
        self.model_name = options.model
        self.n_trained = self.n_tasks * self.n_samples * self.n_turns * self.n_new
        """Sampled tokens of a step."""

    @cached_property
    def model(self) -> LoadedModel:
        if self.model_name == "tiny":
            texts = [f"{word} <|im_start|>user assistant" for word in _WORDS * 3]
            tokenizer = train_tokenizer(texts, vocab_size=1024)
            module: Any = build_tiny(tokenizer, {"num_hidden_layers": 2}, seed=17)
            return LoadedModel(module=module.to(self.load_device), tokenizer=tokenizer)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return load_model("smollm2", dtype=dtype, device=self.load_device, config_kwargs={})

    @cached_property
    def renderer(self) -> ChatMLRenderer:
        return ChatMLRenderer(self.model.tokenizer)

    def make_tasks(self, n_steps: int) -> list[Task]:
        """Every step has prompts of its own: with repeated ones, episodes would share a session."""
        return [
            Task(key=f"w2-{number}", prompt=write_words(PROMPT_WORDS, seed=number), env_key="w2")
            for number in range(self.n_tasks * n_steps)
        ]

    def render_prompt(self, task: Task) -> list[int]:
        return self.renderer.render_prompt([Message(role="user", content=task.prompt)], (TOOL,))

    @cached_property
    def episode_tokens(self) -> int:
        """The most tokens of an episode, rounded up."""
        tasks = self.make_tasks(1)
        prompt = max(len(self.render_prompt(task)) for task in tasks)
        reply = Message(role="tool", content=answer(tasks[0].key, 0), tool_call_id="call_0")
        between = len(self.renderer.render_continuation(0, [reply]) or ())
        exact = prompt + self.n_turns * (self.n_new + between + 8)
        return -(-exact // 64) * 64


_WORDS = [
    "able", "account", "after", "again", "air", "all", "along", "also", "area", "back", "bank",
    "base", "best", "big", "board", "body", "book", "box", "business", "call", "car", "care",
    "case", "change", "child", "city", "class", "close", "code", "cold", "common", "company",
    "control", "cost", "country", "course", "day", "deal", "death", "door", "down", "early",
    "east", "effect", "end", "even", "event", "fact", "family", "far", "field", "figure", "final",
    "fire", "food", "force", "form", "free", "friend", "full", "game", "general", "girl", "good",
    "group", "hand",
]  # fmt: skip


def write_words(n_words: int, *, seed: int | str) -> str:
    rng = Random(f"words/{seed}")
    return " ".join(rng.choice(_WORDS) for _ in range(n_words))


def answer(task: str, turn: int) -> str:
    return write_words(RESULT_WORDS, seed=f"{task}/{turn}")


class Attempts:
    """Numbers the attempts at each task in the order in which they start."""

    def __init__(self, n_samples: int) -> None:
        self._n_samples, self._started = n_samples, Counter[str]()

    def next(self, task: str) -> int:
        self._started[task] += 1
        return (self._started[task] - 1) % self._n_samples


class Notes:
    """The tool in TRL's form: the public methods of an environment are its tools."""

    work: Work
    attempts: Attempts
    scale = 1.0
    tool_seconds = 0.0
    """Time inside the tool, over all instances."""
    n_running = most_running = 0
    """Calls at the same time, now and at most."""
    latencies: list[
        tuple[int, float]
    ]  # turn and unscaled seconds of every call since the last step

    def reset(self, task: str, **_: object) -> None:
        self._task, self._turn = task, 0
        self._attempt = Notes.attempts.next(task)

    def get_reward(self) -> float:
        return draw_reward(self._task, self._attempt)

    async def look_up(self, topic: str) -> str:
        """
        Read what the notes say about a topic.

        Args:
            topic: What to look for.
        """
        start = perf_counter()
        Notes.n_running += 1
        Notes.most_running = max(Notes.most_running, Notes.n_running)
        seconds = draw_latency(self._task, self._attempt, self._turn)
        await asyncio.sleep(seconds * Notes.scale)
        Notes.n_running -= 1
        result = answer(self._task, self._turn)
        Notes.latencies.append((self._turn, seconds))
        self._turn += 1
        Notes.tool_seconds += perf_counter() - start
        return result


# TRL puts the return type into the prompt; without it both prompts are equal.
del Notes.look_up.__annotations__["return"]
TOOL = ToolSpec(**get_json_schema(Notes.look_up)["function"])


class SlowTool:
    """Calls the tool after every turn but the last, whatever was sampled."""

    def __init__(self, task: Task, attempt: int, work: Work) -> None:
        self._task, self._attempt, self._work, self._turn = task, attempt, work, 0

    async def reset(self) -> Observation:
        question = Message(role="user", content=self._task.prompt)
        return Observation(messages=(question,), tools=(TOOL,))

    async def step(self, action: Message) -> Step:
        turn, self._turn = self._turn, self._turn + 1
        if self._turn == self._work.n_turns:
            return Step(messages=(), done=True)
        seconds = draw_latency(self._task.key, self._attempt, turn)
        await asyncio.sleep(seconds * self._work.scale)
        reply = Message(role="tool", content=answer(self._task.key, turn), tool_call_id="call_0")
        return Step(messages=(reply,), done=False)

    async def grade(self) -> Grade:
        return Grade(reward=draw_reward(self._task.key, self._attempt), success=False)

    async def close(self) -> None: ...


def summarize(seconds: Sequence[float], tokens: Sequence[int]) -> dict[str, Any]:
    return {
        "seconds_per_step": round(sum(seconds) / len(seconds), 3),
        "median": round(median(seconds), 3),
        "range": [round(min(seconds), 3), round(max(seconds), 3)],
        "steps": len(seconds),
        "trained_tokens_per_step": round(sum(tokens) / len(tokens)),
        "tokens_per_second": round(sum(tokens) / sum(seconds)),
    }


def hash_prompts(work: Work) -> str:
    prompts = [work.render_prompt(task) for task in work.make_tasks(1)]
    return hashlib.sha256(repr(prompts).encode()).hexdigest()[:12]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def read_peak_gib(device: torch.device) -> float:
    return round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else 0.0
