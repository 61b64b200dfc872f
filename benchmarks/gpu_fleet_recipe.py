"""Three steps of Fleet's Qwen3-8B recipe (preset fleet_qwen3_8b) on one GPU.

    python -m benchmarks.gpu_fleet_recipe           # one H200
    python -m benchmarks.gpu_fleet_recipe --tiny    # the same on a CPU, with a tiny model

The weights are random in the shape of Qwen3-8B, except that the head continues certain tokens by
certain others: some random words, then a tool call with a random argument. So the engine samples
tool calls as it samples anything else, with exact logprobs. Episodes run against the Fleet-compatible
server in a process of its own; the pages of one task in six are so long that its episodes exceed
40,000 tokens. Differences from the preset: 6 tasks x 4 attempts, at most 5 turns, no evaluation and no
checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, cast
from unittest.mock import patch

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from benchmarks.fleet_archive import make_tasks, serve_archive
from benchmarks.fleet_model import build_model
from benchmarks.fleet_report import extrapolate, format_tables, judge, plan_phases

from skyfleet.config.loading import load_config_file
from skyfleet.config.root import RunConfig
from skyfleet.learner import single_device
from skyfleet.learner.batching import pack
from skyfleet.models.loading import LoadedModel
from skyfleet.tracking.step_log import StepLog
from skyfleet.trainer.assemble import GivenObjects
from skyfleet.trainer.available_memory import GIB
from skyfleet.trainer.callbacks import StepResult
from skyfleet.trainer.fit_memory import FittedConfig, fit_training
from skyfleet.trainer.loop import train_steps
from skyfleet.trainer.run import Run
from skyfleet.trainer.training_run import open_training_run

N_TASKS, N_SAMPLES, MAX_TURNS = 6, 4, 5
RECIPE_TASKS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What differs between the benchmark and its test on a CPU."""

    model: dict[str, int]
    long_words: int
    short_words: int
    long_tokens: int
    """An episode with more tokens is long."""
    overrides: tuple[str, ...] = ()


FULL = Size(
    model={
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151_936, "max_position_embeddings": 40_960,
    },
    long_words=9_900,
    short_words=120,
    long_tokens=40_000,
    overrides=("trainer.device=cuda",),
)  # fmt: skip
TINY = Size(
    model={
        "hidden_size": 160, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "vocab_size": 8192, "max_position_embeddings": 40_960,
    },
    long_words=220,
    short_words=10,
    long_tokens=1_100,
    overrides=(
        "trainer.device=cpu",
        "generator.max_input_length=2200",
        "generator.sampling_params.max_generate_length=160",
        "generator.eval_sampling_params.max_generate_length=160",
    ),
)  # fmt: skip


class Phases:
    """Seconds and peak memory of each phase, and the tokens of each micro-batch."""

    def __init__(self, device: torch.device) -> None:
        self.rows: list[dict[str, Any]] = [{}]
        self.microbatches: list[int] = []
        self._on_gpu = device.type == "cuda"

    def end_step(self) -> None:
        self.rows.append({})

    @contextmanager
    def measuring(self) -> Iterator[None]:
        timed = StepLog.timed

        @contextmanager
        def measure(log: StepLog, phase: str) -> Iterator[None]:
            if self._on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            start = perf_counter()
            with timed(log, phase):
                yield
                if self._on_gpu:
                    torch.cuda.synchronize()
            self.rows[-1][phase] = {
                "seconds": round(perf_counter() - start, 2),
                "peak_gib": _peak_gib() if self._on_gpu else 0.0,
                "reserved_gib": _reserved_gib() if self._on_gpu else 0.0,
            }
            print(f"  {phase}: {self.rows[-1][phase]}", flush=True)

        def pack_and_count(*args: Any, **kwargs: Any) -> Any:
            batches = pack(*args, **kwargs)
            self.microbatches += [_count_tokens(batch) for batch in batches]
            return batches

        with (
            patch.object(StepLog, "timed", measure),
            patch.object(single_device, "pack", pack_and_count),
        ):
            yield


def _count_tokens(batch: Any) -> int:
    try:
        return int(batch.attention.positions_T.numel())
    except AttributeError:
        return 0


def _peak_gib() -> float:
    return round(torch.cuda.max_memory_allocated() / GIB, 2)


def _reserved_gib() -> float:
    return round(torch.cuda.max_memory_reserved() / GIB, 2)


def make_config(size: Size, options: argparse.Namespace, folder: str) -> RunConfig:
    overrides = [
        f"trainer.run_path={folder}/run",
        f"trainer.ckpt_path={folder}/checkpoints",
        f"trainer.export_path={folder}/exports",
        f"trainer.train_batch_size={N_TASKS}",
        f"trainer.policy_mini_batch_size={N_TASKS}",
        f"trainer.epochs={options.steps}",
        f"trainer.max_training_steps={options.steps}",
        "trainer.eval_before_train=false",
        "trainer.eval_interval=-1",
        "trainer.ckpt_interval=-1",
        f"generator.n_samples_per_prompt={N_SAMPLES}",
        f"generator.max_turns={MAX_TURNS}",
        "data.train_data=[]",
        "data.val_data={}",
        "data.held_out_envs=[]",
    ]
    return load_config_file("fleet_qwen3_8b", [*overrides, *size.overrides, *options.set])


def leave_room(
    config: RunConfig, size: Size, options: argparse.Namespace, fitted: FittedConfig, folder: str
) -> tuple[RunConfig, str]:
    """Smaller micro-batches if the engine's KV cache would not hold one long episode.

    The engine takes what the learner leaves of the GPU, after the adapters are allocated.
    """
    plan, model = fitted.plan, size.model
    if plan is None or not torch.cuda.is_available():
        return config, ""
    free_bytes, _ = torch.cuda.mem_get_info()
    adapters = sum(part.n_bytes for part in plan.held if part.name.startswith("LoRA"))
    expected = free_bytes - adapters - fitted.learner_bytes - GIB
    width = 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"]
    # The result of the last call is in no prompt; 1,000 tokens of everything else.
    prompt = (MAX_TURNS - 1) * size.long_words + 1000
    longest = prompt + config.generator.sampling_params.max_generate_length
    if expected >= longest * width * 2:
        return config, ""
    tokens = 3 * config.max_episode_tokens // 2
    key = f"trainer.max_tokens_per_microbatch={tokens}"
    options.set.append(key)
    note = f"{key}, because the KV cache would be {expected / GIB:.1f} GiB"
    return make_config(size, options, folder), note


def summarize_step(result: StepResult, size: Size) -> dict[str, Any]:
    episodes = [t for group in result.groups for t in group.trajectories]
    lengths = [_trained_length(one.loss_mask[:]) for t in episodes for one in t.transcripts]
    n_calls = sum(len(turn.action.tool_calls) for t in episodes for turn in t.turns)
    n_turns = sum(len(t.turns) for t in episodes)
    return {
        "episodes": len(episodes),
        "failed": [t.failure.detail[:200] for t in episodes if t.failure is not None],
        "graded": sum(t.grade is not None for t in episodes),
        "endings": sorted({t.ending.value for t in episodes}),
        "long_episodes": sum(length > size.long_tokens for length in lengths),
        "longest": max(lengths, default=0),
        "tokens": sum(lengths),
        "sampled_tokens": sum(sum(one.loss_mask[:]) for t in episodes for one in t.transcripts),
        "turns": n_turns,
        "tool_calls": n_calls,
        "reward": round(result.reward, 3) if result.reward is not None else None,
        "metrics": {
            key: round(value, 5)
            for key, value in result.metrics.items()
            if key.startswith(("timing/", "policy/", "sentinels/", "loss/"))
        },
    }


def _trained_length(mask: Sequence[bool]) -> int:
    """Tokens up to the last sampled one; the learner leaves out what follows."""
    return len(mask) - next((i for i, sampled in enumerate(reversed(mask)) if sampled), len(mask))


async def train(
    size: Size, options: argparse.Namespace, phases: Phases, config: RunConfig, model: LoadedModel
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    given = GivenObjects(train_tasks=make_tasks(N_TASKS), eval_sets={}, model=model)
    rows, engine_info = [], dict[str, float]()
    async with open_training_run(config, given=given, on_progress=_report) as run:
        engine: Any = run.inference.engines[0]
        slots = getattr(engine, "_slots", None)
        if slots is not None:
            keys = slots._keys  # layers, blocks, tokens of a block, heads, head size
            engine_info["kv_pool_gib"] = round(2 * keys.nbytes / GIB, 2)
            engine_info["kv_pool_tokens"] = keys.shape[1] * keys.shape[2]
        _report(f"ready; {engine_info}")
        steps = cast("AsyncGenerator[StepResult, None]", train_steps(run))
        async with aclosing(steps):
            computed, start = getattr(engine, "tokens_computed", 0), perf_counter()
            async for result in steps:
                row = summarize_step(result, size)
                row["seconds"] = round(perf_counter() - start, 2)
                row["engine_tokens"] = getattr(engine, "tokens_computed", 0) - computed
                row["microbatch_tokens"], phases.microbatches = phases.microbatches, []
                row["phases"] = phases.rows[-1]
                phases.end_step()
                rows.append(row)
                _report(f"step {result.number}: {json.dumps(row)}")
                computed, start = getattr(engine, "tokens_computed", 0), perf_counter()
                if elapsed() + row["seconds"] > options.deadline:
                    _report(f"another step would end after --deadline {options.deadline} s")
                    break
    return rows, engine_info


_STARTED = perf_counter()


def elapsed() -> float:
    return perf_counter() - _STARTED


def _report(line: str) -> None:
    print(f"[{elapsed():.0f} s] {line}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--deadline", type=float, default=420, help="start no step that would end later, in seconds"
    )
    parser.add_argument("--set", action="append", default=[], help="key=value of the configuration")
    parser.add_argument("--output", type=Path, help="a file for the line of JSON")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    size = TINY if options.tiny else FULL
    device = torch.device("cpu" if options.tiny else "cuda")
    problem, rows, planned, info = (
        "",
        list[dict[str, Any]](),
        dict[str, float](),
        dict[str, float](),
    )
    phases = Phases(device)
    with (
        tempfile.TemporaryDirectory() as folder,
        serve_archive(
            Path(folder) / "server.log", long_words=size.long_words, short_words=size.short_words
        ),
        phases.measuring(),
        patch.object(Run, "save", lambda run: None),  # 16 GB per checkpoint
    ):
        config = make_config(size, options, folder)
        _report("building the model")
        model = build_model(size.model, config, device=device)
        weight_bytes = sum(p.nbytes for p in model.module.parameters())
        fitted = fit_training(config, model=model)
        config, note = leave_room(config, size, options, fitted, folder)
        if note:
            _report(note)
            fitted = fit_training(config, model=model)
        _report(f"built; {fitted.describe()}; changes: {fitted.changes}")
        try:
            rows, info = asyncio.run(train(size, options, phases, config, model))
        except Exception as error:  # what was measured before it is still reported
            problem = f"{type(error).__name__}: {error}"[:2000]
            _report(f"FAILED: {problem}")
        planned = plan_phases(fitted, weight_bytes, info.get("kv_pool_gib", 0.0))
        if problem:
            print((Path(folder) / "server.log").read_text()[-1000:], flush=True)
    record = {
        "benchmark": "gpu_fleet_recipe",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "size": "tiny" if options.tiny else "Qwen3-8B",
        "problem": problem,
        "steps": rows,
        "planned_gib": planned,
        "plan": fitted.describe(),
        "changes": [*fitted.changes, *([note] if note else [])],
        "engine": info,
        "extrapolated": extrapolate(rows, factor=RECIPE_TASKS / N_TASKS) if rows else {},
        "verdict": judge(rows, options.steps, size.long_tokens)
        if rows
        else [f"no step: {problem}"],
        "seconds": round(elapsed(), 1),
    }
    line = json.dumps(record)
    print(line, flush=True)
    if options.output:
        options.output.write_text(f"{line}\n")
    print(
        "",
        *format_tables(record, f"{RECIPE_TASKS} x {N_SAMPLES}"),
        f"{elapsed():.0f} s in all",
        sep="\n",
        flush=True,
    )
    if problem:
        sys.exit(1)


if __name__ == "__main__":
    main()
