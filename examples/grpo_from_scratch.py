"""GRPO in one file: an agent learns to use tools by trial, in about a minute on one core.

A tiny transformer acts in `github`, a built-in environment with issues. Supervised fine-tuning on
solved tasks makes it succeed now and then. Then it learns by reinforcement: it attempts each task
several times, a verifier grades the attempts, and the update raises the probability of those above
the group mean and lowers the others. That is GRPO (arXiv 2402.03300); skyfleet is this loop for real
models.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyfleet.chat.message import Message, ToolCall
from skyfleet.envs.env import Env, close_env, grade_env
from skyfleet.tasks.task import Task
from skyfleet.worlds.catalog import generate_world_tasks, open_world

TEMPLATES = ("act_on_number", "assign_oldest")  # two task templates: a minute is short
N_ATTEMPTS = 8  # per task: the group that an attempt is compared with
MAX_TOKENS = 112  # per attempt
CLIP = 0.2  # PPO's clip range


# 1. Tokens. An attempt is like a terminal: the environment prints lines, the agent types after ">".
class Vocabulary:
    """Numbers words, runs of punctuation and line ends in order of appearance. Drops spaces."""

    def __init__(self) -> None:
        self._pieces = {"\n": 0}

    def encode(self, text: str) -> list[int]:
        pieces = re.findall(r"\w+|[^\w\s]+|\n", text)
        return [self._pieces.setdefault(piece, len(self._pieces)) for piece in pieces]

    def decode(self, tokens: Sequence[int]) -> str:
        known = dict(enumerate(self._pieces))
        return re.sub(r"(?<=\W) | (?=\W)", "", " ".join(known.get(token, "?") for token in tokens))


def read_action(line: str) -> Message:
    """`["get_issue",{"number":7}]` is a tool call; a line that does not parse is text."""
    try:
        name, arguments = json.loads(line)
        call = ToolCall(id="call", name=str(name), arguments=dict(arguments))
    except (ValueError, TypeError):
        return Message(role="assistant", content=line)
    return Message(role="assistant", tool_calls=(call,))


# 2. An attempt at a task. Tokens are only appended: those trained on are those sampled.
@dataclass(slots=True)
class Attempt:
    env: Env
    vocabulary: Vocabulary
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    """True for tokens that the agent sampled: the only ones it is trained on."""
    logprobs: list[float] = field(default_factory=list)
    """The logprob of each token when it was sampled."""
    turn_start: int = 0
    reward: float | None = None
    """None until the attempt ends."""

    def observe(self, messages: Sequence[Message]) -> None:
        for token in self.vocabulary.encode("\n".join(m.text for m in messages) + "\n>"):
            self._append(token, 0.0, is_action=False)
        self.turn_start = len(self.tokens)

    async def write(self, token: int, logprob: float = 0.0) -> None:
        """Append one token. A line end ends the turn, and the environment steps."""
        self._append(token, logprob, is_action=True)
        done = len(self.tokens) >= MAX_TOKENS
        if token == 0:
            line = self.vocabulary.decode(self.tokens[self.turn_start : -1])
            step = await self.env.step(read_action(line))
            self.observe(step.messages)
            done = done or step.done
        if done:  # The verifier grades the final state of the database, not the text.
            grade = await grade_env(self.env, ())
            self.reward = grade.reward if grade else 0.0
            await close_env(self.env)

    def _append(self, token: int, logprob: float, *, is_action: bool) -> None:
        self.tokens.append(token)
        self.loss_mask.append(is_action)
        self.logprobs.append(logprob)


async def start(task: Task, vocabulary: Vocabulary) -> Attempt:
    attempt = Attempt(env=await open_world(task), vocabulary=vocabulary)
    *_, instruction = (await attempt.env.reset()).messages
    attempt.observe([instruction])
    return attempt


async def demonstrate(task: Task, vocabulary: Vocabulary) -> Attempt:
    """The reference solution of a task, as if the agent had sampled it."""
    attempt = await start(task, vocabulary)
    calls = [json.dumps([c.name, c.arguments], separators=(",", ":")) for c in task.solution]
    for token in vocabulary.encode("\n".join([*calls, "<done>\n"])):
        await attempt.write(token)
    return attempt


async def roll_out(model: Qwen3ForCausalLM, attempts: Sequence[Attempt]) -> None:
    """Run all attempts in parallel: each tick feeds every one a token, observed or sampled."""
    tick, cache = 0, None
    while any(attempt.reward is None for attempt in attempts):
        token_B1 = torch.tensor([a.tokens[tick : tick + 1] or [0] for a in attempts])
        with torch.no_grad():
            output = model(token_B1, past_key_values=cache, use_cache=True)
        logprobs_BV = output.logits[:, -1].log_softmax(-1)
        sampled_B1 = torch.multinomial(logprobs_BV.exp(), 1)
        for attempt, token, logprobs_V in zip(attempts, sampled_B1, logprobs_BV, strict=True):
            if attempt.reward is None and tick == len(attempt.tokens) - 1:
                await attempt.write(int(token), float(logprobs_V[token]))
        tick, cache = tick + 1, output.past_key_values


# 3. Updates. Without advantages it is supervised fine-tuning.
def grpo_advantages(rewards_GA: Tensor) -> Tensor:
    """(reward - group mean) / group deviation. Equal rewards have zero advantage."""
    centred_GA = rewards_GA - rewards_GA.mean(dim=1, keepdim=True)
    return centred_GA / (rewards_GA.std(dim=1, keepdim=True) + 1e-6)


class Learner:
    def __init__(self, model: Qwen3ForCausalLM, *, lr: float) -> None:
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)

    def step(self, attempts: Sequence[Attempt], advantages_B1: Tensor | None = None) -> float:
        """One AdamW step on the tokens that the agent sampled."""
        tokens_BT = pad_sequence([torch.tensor(a.tokens) for a in attempts], batch_first=True)
        mask_BT = pad_sequence([torch.tensor(a.loss_mask) for a in attempts], batch_first=True)
        old_logprobs_BT = pad_sequence(
            [torch.tensor(a.logprobs) for a in attempts], batch_first=True
        )
        logprobs_BTV = self._model(tokens_BT[:, :-1]).logits.log_softmax(-1)
        objective_BT = logprobs_BT = logprobs_BTV.gather(2, tokens_BT[:, 1:, None]).squeeze(2)
        if advantages_B1 is not None:  # PPO's clipped objective (arXiv 1707.06347)
            ratio_BT = (logprobs_BT - old_logprobs_BT[:, 1:]).exp()
            clipped_BT = ratio_BT.clamp(1 - CLIP, 1 + CLIP)
            objective_BT = torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)
        loss = -objective_BT[mask_BT[:, 1:]].mean()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.detach())


# 4. Training.
async def main(
    *, n_tasks: int = 2000, sft_steps: int = 120, steps: int = 40, tasks_per_step: int = 16
) -> tuple[list[float], list[float]]:
    """Returns the loss of every supervised step and the mean reward of every GRPO step."""
    torch.manual_seed(0)
    rng, vocabulary, losses, rewards = Random(0), Vocabulary(), list[float](), list[float]()
    sampled = generate_world_tasks("github", split="train", count=n_tasks)
    tasks = [task for task in sampled if task.metadata["template"] in TEMPLATES]
    demonstrations = [await demonstrate(task, vocabulary) for task in tasks]
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 256}
    config = Qwen3Config(initializer_range=0.08, tie_word_embeddings=True, **shape)
    model = Qwen3ForCausalLM(config)

    learner = Learner(model, lr=3e-3)
    for step in range(1, sft_steps + 1):
        losses.append(learner.step(rng.sample(demonstrations, 16)))
        print(f"sft {step:3}  loss {losses[-1]:.3f}")

    learner = Learner(model, lr=1e-3)
    for step in range(1, steps + 1):
        batch = rng.sample(tasks, tasks_per_step)
        attempts = [await start(task, vocabulary) for task in batch for _ in range(N_ATTEMPTS)]
        await roll_out(model, attempts)
        rewards_GA = torch.tensor([a.reward for a in attempts]).view(-1, N_ATTEMPTS)
        advantages_B1 = grpo_advantages(rewards_GA).view(-1, 1)
        for rows in torch.randperm(len(attempts)).view(4, -1):
            learner.step([attempts[row] for row in rows.tolist()], advantages_B1[rows])
        rewards.append(rewards_GA.mean().item())
        print(f"grpo {step:3}  reward {rewards[-1]:.3f}  last ten {fmean(rewards[-10:]):.3f}")
    return losses, rewards


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main())
