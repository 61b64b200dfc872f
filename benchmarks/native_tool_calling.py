"""Native tool calling against a live vLLM server: the same episodes rendered there and here, token by token.

Start the server as docs/engines.md says (`--enable-auto-tool-choice --tool-call-parser hermes`, and for
`--train` the worker extension), from the folder that `--model` names. The script plays every task
greedily on both paths, then `--train N` steps of each, and prints what differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from pathlib import Path
from tempfile import TemporaryDirectory

from skyfleet.chat.transcript import Transcript
from skyfleet.config.loading import load_config
from skyfleet.config.root import RunConfig
from skyfleet.engines.factory import build_sampling_params
from skyfleet.envs.registry import env_factory
from skyfleet.rollouts.episode import collect
from skyfleet.trainer.limits import build_limits
from skyfleet.trainer.policy_client import open_inference_client
from skyfleet.trainer.tasks import load_sources
from skyfleet.trainer.training_run import run_training
from skyfleet.trajectories.trajectory import Trajectory

NATIVE = (
    "generator.use_native_tool_calling=true",
    "environment.skyrl_gym.tau_bench.use_native_tool_calling=true",
)
SETTINGS = """
data: {{train_data: ["{tasks}"], val_data: []}}
trainer:
  device: cpu
  bf16: false
  policy: {{model: {{path: {model}}}, optimizer_config: {{lr: 1.0e-6}}}}
  algorithm: {{use_kl_loss: false}}
  train_batch_size: 2
  policy_mini_batch_size: 2
  eval_interval: -1
  eval_before_train: false
generator:
  run_engines_locally: false
  remote_inference_engine_urls: ["{url}"]
  n_samples_per_prompt: 2
  max_turns: 3
  max_input_length: 1800
  eval_sampling_params: {{temperature: {temperature}, max_generate_length: 60}}
  sampling_params: {{max_generate_length: 40}}
  trajectory_timeout_seconds: 600
"""


def build_config(args: argparse.Namespace, *overrides: str) -> RunConfig:
    text = SETTINGS.format(
        tasks=args.tasks, model=args.model, url=args.url, temperature=args.temperature
    )
    return load_config(text, overrides)


async def play(config: RunConfig) -> list[Trajectory]:
    tasks = load_sources(config.data.train_data, key="data.train_data")
    async with open_inference_client(config, None) as client:
        sampling = build_sampling_params(config.generator.eval_sampling_params, seed=0)
        groups = await collect(
            tasks,
            env_factory(config),
            client.agent(sampling),
            build_limits(config),
            n_samples=1,
            max_concurrent=4,
        )
    return [attempt for group in groups for attempt in group.trajectories]


def describe(name: str, attempts: list[Trajectory]) -> str:
    turns = [turn for attempt in attempts for turn in attempt.turns]
    malformed = sum(bool(turn.action.malformed_calls) for turn in turns)
    calls = sum(len(turn.action.tool_calls) for turn in turns)
    several = sum(len(attempt.transcripts) > 1 for attempt in attempts)
    return (
        f"{name}: {len(attempts)} episodes, {len(turns)} turns, {calls} calls, {malformed} turns with "
        f"a malformed call, {several} episodes with several transcripts"
    )


def compare(native: list[Trajectory], tokens: list[Trajectory]) -> str:
    """First prompts and whole episodes whose tokens are equal; episodes part where a turn differs."""
    prompts = equal = 0
    for one, other in zip(native, tokens, strict=True):
        if not (one.transcripts and other.transcripts):
            continue
        firsts = [
            attempt.transcripts[0].token_ids[: list(attempt.transcripts[0].loss_mask).index(True)]
            for attempt in (one, other)
        ]
        prompts += firsts[0] == firsts[1]
        equal += list(map(_cut, one.transcripts)) == list(map(_cut, other.transcripts))
    n = len(native)
    return f"first prompts with equal tokens: {prompts} of {n}; whole episodes: {equal} of {n}"


def _cut(transcript: Transcript) -> list[int]:
    """Up to the last sampled token: the native path gets an observation with the next turn only."""
    mask = list(transcript.loss_mask)
    return list(transcript.token_ids)[: len(mask) - mask[::-1].index(True)]


def train(args: argparse.Namespace, *overrides: str) -> list[dict[str, float]]:
    with TemporaryDirectory() as folder:
        config = build_config(
            args,
            "generator.backend=vllm",
            f"trainer.max_training_steps={args.train}",
            f"trainer.run_path={folder}/run",
            *overrides,
        )
        asyncio.run(run_training(config))
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if json.loads(line).get("step")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="The folder that the server serves.")
    parser.add_argument("--url", default="http://127.0.0.1:18765/v1")
    parser.add_argument("--tasks", default="world:github?split=train&count=8")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--train", type=int, default=0, help="Training steps of each path.")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    paths = {"native (server renders)": NATIVE, "tokens (rendered here)": ()}
    played = {
        name: asyncio.run(play(build_config(args, "generator.backend=openai", *flags)))
        for name, flags in paths.items()
    }
    for name, attempts in played.items():
        print(describe(name, attempts))
    print(compare(*played.values()))
    for name, flags in paths.items() if args.train else ():
        for row in train(args, *flags):
            keys = ("reward/parse_failure_rate", "policy/rollout_train_logprobs_abs_diff_max")
            print(name, "step", row["step"], {key: row.get(key) for key in keys})


if __name__ == "__main__":
    main()
