"""W2: GRPO steps whose tool calls take time: both of skyfleet's loops and TRL, on one GPU.

SmolLM2-135M in bfloat16, 64 tasks x 8 attempts, 8 turns of exactly 48 sampled tokens, one optimiser
step, no KL. After each turn but the last the tool is called, which takes 200 ms on average
(lognormal, sigma 0.5, the same time for the same task, attempt and turn in every mode). skyfleet
runs as `skyfleet train` does, with its log, archive and sentinels.

    python -m benchmarks.gpu_latency --modes sync,async,trl
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

# TRL warns about environment_factory, transformers must not ask the hub, and FlashInfer is missing.
os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import torch
from benchmarks.latency_trl import measure_trl
from benchmarks.latency_work import (
    EPS_CLIP,
    LR,
    WARM_UP_STEPS,
    Attempts,
    SlowTool,
    Work,
    hash_prompts,
    read_peak_gib,
    summarize,
    synchronize,
)

from skyfleet.chat.chatml import ChatMLRenderer
from skyfleet.config.loading import load_config_file
from skyfleet.config.root import RunConfig
from skyfleet.config.trainer import Trainer
from skyfleet.tasks.task import Task
from skyfleet.trainer.assemble import GivenObjects
from skyfleet.trainer.callbacks import Callbacks, StepResult
from skyfleet.trainer.training_run import run_training

MODES = ("sync", "async", "trl")
RESULT_PREFIX = "RESULT "
NOT_HERE = "not in this version"


def knows_async() -> bool:
    return "fully_async" in Trainer.model_fields


def count_steps(options: argparse.Namespace, mode: str) -> int:
    """The last steps of the asynchronous loop have no rollouts beside them and are not measured."""
    return WARM_UP_STEPS + int(options.steps) + (options.staleness if mode == "async" else 0)


def make_config(work: Work, options: argparse.Namespace, mode: str, folder: str) -> RunConfig:
    n_steps = count_steps(options, mode)
    n_groups = work.n_tasks * (1 + options.staleness) if mode == "async" else work.n_tasks
    overrides = [
        f"trainer.run_path={folder}/run",
        f"trainer.ckpt_path={folder}/checkpoints",
        f"trainer.export_path={folder}/exports",
        f"trainer.device={work.device.type}",
        "data.train_data=[]",
        "data.val_data={}",
        "data.held_out_envs=[]",
        f"trainer.policy.optimizer_config.lr={LR}",
        "trainer.policy.optimizer_config.num_warmup_steps=0",
        "trainer.warm_start.steps=0",
        f"trainer.algorithm.eps_clip_high={EPS_CLIP}",
        "trainer.algorithm.zero_variance_filter=false",
        f"trainer.train_batch_size={work.n_tasks}",
        f"trainer.policy_mini_batch_size={work.n_tasks}",
        f"trainer.max_tokens_per_microbatch={options.microbatch_tokens}",
        "trainer.epochs=1",
        f"trainer.max_training_steps={n_steps}",
        "trainer.eval_before_train=false",
        "trainer.eval_interval=-1",
        "trainer.ckpt_interval=-1",
        "trainer.max_ckpts_to_keep=1",
        f"generator.n_samples_per_prompt={work.n_samples}",
        f"generator.max_turns={work.n_turns}",
        f"generator.max_input_length={work.episode_tokens}",
        f"generator.max_num_seqs={n_groups * work.n_samples}",
        f"generator.sampling_params.max_generate_length={work.n_new}",
        f"generator.eval_sampling_params.max_generate_length={work.n_new}",
    ]
    if mode == "async":
        overrides += [
            "trainer.fully_async.enabled=true",
            f"trainer.fully_async.max_staleness_steps={options.staleness}",
            f"trainer.fully_async.num_parallel_generation_workers={n_groups}",
        ]
    return load_config_file("smollm2", [*overrides, *options.set])


def measure_skyfleet(work: Work, options: argparse.Namespace, mode: str) -> dict[str, Any]:
    attempts, ends, rows = Attempts(work.n_samples), [perf_counter()], list[dict[str, Any]]()

    async def open_env(task: Task) -> SlowTool:
        return SlowTool(task, attempts.next(task.key), work)

    def on_step(result: StepResult) -> None:
        if (
            mode == "sync"
        ):  # the asynchronous loop has rollouts on the GPU, which are not waited for
            synchronize(work.device)
        ends.append(perf_counter())
        episodes = [t for group in result.groups for t in group.trajectories]
        failed = [t.failure.detail for t in episodes if t.failure is not None]
        assert not failed, failed[:3]
        transcripts = [one for episode in episodes for one in episode.transcripts]
        rows.append(
            {
                "trained_tokens": sum(sum(one.loss_mask[:]) for one in transcripts),
                "all_tokens": sum(map(len, transcripts)),
                "episodes": len(episodes),
                "turns": sorted({len(episode.turns) for episode in episodes}),
                "metrics": _select(result.metrics),
            }
        )

    def build_renderer(*_: object) -> ChatMLRenderer:
        work.renderer.stop_token_ids = ()  # no token ends a turn early
        return work.renderer

    # The asynchronous loop may start groups that it never trains on.
    tasks = work.make_tasks(count_steps(options, mode) + options.staleness + 1)
    given = GivenObjects(
        open_env=open_env,
        train_tasks=tasks,
        eval_sets={},
        model=work.model,
        callbacks=Callbacks(on_step=on_step),
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        patch("skyfleet.trainer.load_policy.build_renderer", build_renderer),
    ):
        config = make_config(work, options, mode, folder)
        start = perf_counter()
        asyncio.run(run_training(config, given=given))
        whole = perf_counter() - start
    assert {turn for row in rows for turn in row["turns"]} == {work.n_turns}
    last = WARM_UP_STEPS + options.steps
    measured = rows[WARM_UP_STEPS:last]
    seconds = [end - begin for begin, end in pairwise(ends[WARM_UP_STEPS : last + 1])]
    names = sorted(measured[0]["metrics"])
    return {
        "mode": mode,
        "status": "ok",
        **summarize(seconds, [row["trained_tokens"] for row in measured]),
        "all_tokens_per_step": round(median(row["all_tokens"] for row in measured)),
        "prompt_hash": hash_prompts(work),
        "metrics": {
            name: round(median(row["metrics"].get(name, 0.0) for row in measured), 4)
            for name in names
        },
        "whole_run_seconds": round(whole, 1),
        "peak_gib": read_peak_gib(work.device),
        **({"staleness": options.staleness} if mode == "async" else {}),
    }


def _select(metrics: Mapping[str, float]) -> dict[str, float]:
    """Phases, staleness, and the difference between the engine's and the learner's logprobs."""
    wanted = ("timing/", "stale", "async", "rollout_train_logprobs_abs_diff_mean")
    return {key: value for key, value in metrics.items() if any(part in key for part in wanted)}


def run_mode(options: argparse.Namespace, mode: str) -> dict[str, Any]:
    """Run one mode in a process of its own: a failure or a full GPU leaves the others alone."""
    if mode == "async" and not knows_async():
        return {"mode": mode, "status": NOT_HERE}
    command = [sys.executable, "-m", "benchmarks.gpu_latency", *sys.argv[1:], "--child", mode]
    start = perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        try:
            child = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=options.mode_timeout
            )
            problem = f"exit status {child.returncode}"
        except subprocess.TimeoutExpired:
            problem = f"stopped after {options.mode_timeout} s"
        log.seek(0)
        text = log.read()
    lines = text.splitlines()
    found = [line for line in lines if line.startswith(RESULT_PREFIX)]
    if found:
        row: dict[str, Any] = json.loads(found[-1].removeprefix(RESULT_PREFIX))
    else:
        row = {"mode": mode, "status": f"failed: {problem}"}
        print(f"--- {mode} failed, the end of its output:", *lines[-40:], sep="\n", flush=True)
    row["process_seconds"] = round(perf_counter() - start, 1)
    print(f"{mode}: {row['status']}, {row['process_seconds']} s", flush=True)
    return row


def format_table(results: Mapping[str, dict[str, Any]], expected: int) -> list[str]:
    lines = [
        "| | seconds per step | range | steps | trained tokens per step | tokens per second | to sync |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    rows: list[tuple[str, dict[str, Any]]] = []
    for mode, result in results.items():
        if result["status"] != "ok":
            lines.append(f"| {mode} | {result['status']} | | | | | |")
        elif mode != "trl":
            rows.append((f"skyfleet, {mode}", result))
        else:
            name = f"TRL, {result['backend']}"
            part = f"{name}: measured, tools take {result['latency_scale']:g} of their time"
            rows.append((part, result["measured"]))
            rows.append(
                (f"{name}, tools' whole time (computed)", result["computed_one_after_another"])
            )
            rows.append(
                (f"{name}, if calls overlapped (computed)", result["computed_calls_overlapped"])
            )
    sync = results.get("sync", {}).get("tokens_per_second")
    for name, row in rows:
        ratio = f"{row['tokens_per_second'] / sync:.3g}x" if sync else ""
        low, high = row["range"]
        cells = [
            name, row["seconds_per_step"], f"{low} to {high}", row["steps"],
            row["trained_tokens_per_step"], row["tokens_per_second"], ratio,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", *compare(results)]
    counts = {row["trained_tokens_per_step"] for _, row in rows}
    hashes = {result["prompt_hash"] for result in results.values() if "prompt_hash" in result}
    lines.append(
        f"trained tokens per step: {sorted(counts)}, expected {expected}: "
        f"{'equal' if counts == {expected} else 'NOT EQUAL'}; prompts: "
        f"{'equal' if len(hashes) <= 1 else 'NOT EQUAL'}"
    )
    return lines


def compare(results: Mapping[str, dict[str, Any]]) -> list[str]:
    """The two goals: asynchronous at least 2x synchronous, synchronous at least 5x TRL."""
    found = {mode: result for mode, result in results.items() if result["status"] == "ok"}
    if "sync" not in found:
        return []
    sync, lines = found["sync"]["tokens_per_second"], list[str]()
    if "async" in found:
        ratio = found["async"]["tokens_per_second"] / sync
        lines.append(f"async / sync, tokens per second: {ratio:.2f} (goal 2)")
    if "trl" in found:
        trl = found["trl"]
        one_by_one = sync / trl["computed_one_after_another"]["tokens_per_second"]
        overlapped = sync / trl["computed_calls_overlapped"]["tokens_per_second"]
        lines.append(
            f"sync / TRL: {one_by_one:.1f} (goal 5; TRL ran {trl['tool_calls_at_once']} tool call "
            f"at once), {overlapped:.1f} if TRL's calls overlapped"
        )
    return lines


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", default="sync,async,trl")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of skyfleet")
    parser.add_argument("--trl-steps", type=int, default=2, help="measured steps of TRL")
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--latency-scale", type=float, default=1.0, help="1: 200 ms on average")
    parser.add_argument("--trl-latency-scale", type=float, default=0.01)
    parser.add_argument("--trl-backend", choices=["auto", "vllm", "generate"], default="auto")
    parser.add_argument("--trl-microbatch", type=int, default=64)
    parser.add_argument("--staleness", type=int, default=1, help="max_staleness_steps")
    parser.add_argument("--microbatch-tokens", type=int, default=65_536)
    parser.add_argument("--model", choices=["smollm2", "tiny"], default="smollm2")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--mode-timeout", type=int, default=280, help="seconds per mode")
    parser.add_argument("--set", action="append", default=[], help="key=value of the configuration")
    parser.add_argument("--output", type=Path, help="a file for the line of JSON")
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_child(options: argparse.Namespace, mode: str) -> None:
    try:
        work = Work(options)
        measure = measure_trl if mode == "trl" else partial(measure_skyfleet, mode=mode)
        row = measure(work, options)
        print(f"{RESULT_PREFIX}{json.dumps(row)}", flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # vLLM's threads and a graph's memory need no orderly end


def main() -> None:
    options = parse_options()
    if options.child:
        run_child(options, options.child)
    modes = options.modes.split(",")
    if unknown := set(modes) - set(MODES):
        sys.exit(f"--modes={options.modes}: {sorted(unknown)[0]!r} is unknown; choose from {MODES}")
    results = {mode: run_mode(options, mode) for mode in modes}
    expected = options.tasks * options.samples * options.turns * options.new_tokens
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    record = {
        "benchmark": "gpu_latency",
        "device": device,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "options": {k: v for k, v in vars(options).items() if k not in ("output", "child")},
        "results": results,
    }
    line = json.dumps(record)
    print(line, flush=True)
    if options.output:
        options.output.write_text(f"{line}\n")
    print("", *format_table(results, expected), sep="\n", flush=True)


if __name__ == "__main__":
    main()
