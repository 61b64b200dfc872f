"""Short runs that are killed: four configurations, forked runs, and what their folders must hold."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.fakes.moody_world import MoodyWorld

from skyfleet.cli.main import main
from skyfleet.config.loading import load_config
from skyfleet.envs import registry
from skyfleet.errors import VerifierError
from skyfleet.tasks.task import Grade, Task
from skyfleet.trainer.training_run import run_training
from skyfleet.trajectories.archive import read_trajectories
from skyfleet.worlds.catalog import get_world

SETTINGS = """
data:
  train_data: ["world:github?split=train&count=4"]
  val_data: {unseen: ["world:github?split=unseen_tasks&count=2"]}
trainer:
  device: cpu
  bf16: false
  policy:
    model: {path: tiny}
    model_config_kwargs:
      {hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 1,
        num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 1100, vocab_size: 300}
    optimizer_config: {lr: 1.0e-2}
  warm_start: {steps: 2, batch_size: 2}
  algorithm: {use_kl_loss: false}
  train_batch_size: 2
  policy_mini_batch_size: 1
  max_tokens_per_microbatch: 2048
  max_training_steps: 6
  eval_interval: 3
  hf_save_interval: 2
  run_path: run
  sentinels: {mode: warn}
generator:
  n_samples_per_prompt: 4
  max_turns: 3
  max_input_length: 1000
  sampling_params: {max_generate_length: 6, stop: [a, e]}
  eval_sampling_params: {max_generate_length: 6, stop: [a, e]}
  max_num_seqs: 16
"""
CONFIGURATIONS = {
    "every step": ("trainer.ckpt_interval=1", "trainer.max_ckpts_to_keep=2"),
    "every 4, LoRA, KL": (
        "trainer.policy.model.path={base}",
        "trainer.policy.model_config_kwargs={{}}",
        "trainer.ckpt_interval=4",
        "trainer.policy.model.lora.rank=2",
        "trainer.policy.model.lora.alpha=4",
        "trainer.algorithm.use_kl_loss=true",
        "trainer.algorithm.kl_estimator_type=k3",
        "trainer.update_ref_every_epoch=true",
    ),
    "every 2, critic, curriculum": (
        "trainer.ckpt_interval=2",
        "trainer.algorithm.advantage_estimator=gae",
        "trainer.critic.model.path=tiny",
        "trainer.critic.optimizer_config.lr=0.001",
        "trainer.curriculum=true",
        "trainer.dump_data_batch=true",
        "trainer.dump_training_trajectories=true",
    ),
    "at the end only": ("trainer.ckpt_interval=-1",),
}


class UncertainWorld(MoodyWorld):
    """Rewards differ within a group, and some grades are unknown, which a sentinel warns about."""

    async def grade(self) -> Grade:
        if self.letters % 3 == 2:
            raise VerifierError("the verifier is broken")
        return await super().grade()


async def open_uncertain(task: Task) -> UncertainWorld:
    return UncertainWorld(get_world(task.env_key), task)


def install_env() -> None:
    registry.ENV_CLASSES["world"] = lambda _: open_uncertain


def warm_up(folder: Path) -> dict[str, tuple[str, ...]]:
    """Import and compile everything once, for the runs forked later; returns their overrides.

    One of them adapts the policy that this run trains.
    """
    install_env()
    base = folder / "base"
    overrides = [f"trainer.run_path={base}", *CONFIGURATIONS["every step"]]
    asyncio.run(run_training(load_config(SETTINGS, overrides)))
    # A forked run collects garbage; it need not look at what is here already.
    gc.collect()
    gc.freeze()
    policy = base / "checkpoints" / "global_step_6" / "policy"
    return {
        name: tuple(word.format(base=policy) for word in words)
        for name, words in CONFIGURATIONS.items()
    }


def run_here(folder: Path, overrides: Sequence[str]) -> None:
    """`skyfleet train` in this process, inside `folder`; ends the process."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    Path("run.yaml").write_text(SETTINGS)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["skyfleet", "train", "run.yaml", *overrides]
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start_run(folder: Path, overrides: Sequence[str]) -> int:
    """Fork a run from this process, which has imported torch already; returns its process id."""
    folder.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child == 0:
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        run_here(folder, overrides)
    return child


def wait_for(
    child: int,
    *,
    kill_after_cpu_seconds: float | None = None,
    kill_when: Callable[[], bool] | None = None,
    by: int = signal.SIGKILL,
) -> tuple[int, float]:
    """The exit code of a run and its CPU seconds, at which it is killed if they are given.

    CPU seconds, because on a busy machine wall time says little about how far a run is. `kill_when`
    is asked every few milliseconds.
    """
    used, sent = 0.0, False
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), used
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        is_time = kill_after_cpu_seconds is not None and used >= kill_after_cpu_seconds
        if not sent and (is_time or (kill_when is not None and kill_when())):
            time.sleep(random.uniform(0, 0.01))  # the clock above has ticks of 10 ms
            os.kill(child, by)
            sent = True
        time.sleep(0.002)


def describe_run(folder: Path) -> dict[str, Any]:
    """Everything of a finished run that must not depend on whether it was killed."""
    run = folder / "run"
    return {
        "metrics": (run / "metrics.jsonl").read_text().splitlines(),
        "timed steps": [row["step"] for row in _rows(run / "timing.jsonl")],
        "findings": _rows(run / "sentinels.jsonl"),
        "episodes": {
            str(path.relative_to(run)): sorted(_describe_episodes(path))
            for path in sorted(run.glob("trajectories/**/*.jsonl.gz"))
        },
        "reports": {
            str(path.relative_to(run)): _hash(path.read_bytes())
            for path in sorted(run.glob("reports/*/*.json"))
        },
        "exports": {
            str(path.relative_to(run)): _hash_file(path)
            for path in sorted(run.glob("exports/**/*"))
            if path.is_file() and "dumped_evals" not in path.parts
        },
        "checkpoints": {
            str(path.relative_to(run)): _hash_file(path)
            for path in sorted(run.glob("checkpoints/global_step_*/**/*"))
            if path.is_file() and path.name != "manifest.json"
        },
        "left over": sorted(
            str(path.relative_to(folder))
            for path in run.rglob(".*")
            if path.suffix in (".draft", ".replaced", ".lock") or path.name == ".lock"
        ),
        "table": [path.read_text() for path in run.glob("results.md")],
    }


def list_differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What a killed run has more, less or differently; it may have more checkpoints."""
    different = []
    for name, value in expected.items():
        other = found[name]
        if name == "checkpoints":
            other = {path: digest for path, digest in other.items() if path in value}
        if other != value:
            different.append(f"{name}: {_first_difference(value, other)}")
    return different


def _first_difference(expected: Any, found: Any) -> str:
    if isinstance(expected, dict):
        keys = [key for key in {**expected, **found} if expected.get(key) != found.get(key)]
        return f"{len(keys)} differ, such as {keys[0]}"
    return f"{str(expected)[:200]!r} and {str(found)[:200]!r}"


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _describe_episodes(path: Path) -> list[str]:
    """In any order: episodes are written as they finish."""
    described = []
    for trajectory in read_trajectories(path):
        tokens = [(t.token_ids[:], t.logprobs[:]) for t in trajectory.transcripts]
        described.append(
            f"{trajectory.task_key} {trajectory.ending} {_hash(repr(tokens).encode())}"
        )
    return described


def _hash_file(path: Path) -> str:
    match path.suffix:
        case ".pt":
            return _hash(b"".join(_list_bytes(torch.load(path, weights_only=True))))
        case ".safetensors":
            return _hash(b"".join(_list_bytes(load_file(path))))
        case ".pkl":  # its bytes depend on which equal objects are the same object
            return _hash(repr(pickle.loads(path.read_bytes())).encode())
        case ".jsonl":  # episodes, with times
            return str(len(path.read_text().splitlines()))
        case _ if path.parts[-2:] == ("trainer", "state.json"):
            state = json.loads(path.read_text())
            # A signal saves the times of the step that it interrupted, too.
            pending = {k for k in state.pop("pending_metrics") if not k.startswith("timing/")}
            del state["run_id"]
            return _hash(json.dumps([state, sorted(pending)]).encode())
        case _:
            return _hash(path.read_bytes())


def _list_bytes(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield value.numpy().tobytes()
    elif isinstance(value, dict):
        for key, item in sorted(value.items(), key=lambda pair: str(pair[0])):
            yield str(key).encode()
            yield from _list_bytes(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _list_bytes(item)
    else:
        yield repr(value).encode()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
