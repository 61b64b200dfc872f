"""The smallest whole run: a few thousand weights, four tasks, three steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skyfleet.config.loading import load_config
from skyfleet.config.root import RunConfig

TRAIN = "world:github?split=train&count=4"
UNSEEN = "world:github?split=unseen_tasks&count=3"
ELSEWHERE = "world:outlook?split=all&count=2"

SETTINGS = f"""
data:
  train_data: ["{TRAIN}"]
  val_data: {{unseen: ["{UNSEEN}"], elsewhere: ["{ELSEWHERE}"]}}
  held_out_envs: [outlook]
trainer:
  device: cpu
  bf16: false
  policy:
    model: {{path: tiny}}
    model_config_kwargs:
      {{hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2,
        num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 1100, vocab_size: 400}}
    optimizer_config: {{lr: 1.0e-2}}
  warm_start: {{steps: 3, batch_size: 2}}
  algorithm: {{kl_estimator_type: k3, kl_loss_coef: 0.01}}
  train_batch_size: 2
  policy_mini_batch_size: 1
  max_tokens_per_microbatch: 2048
  max_training_steps: 3
  eval_interval: 2
  ckpt_interval: 2
generator:
  n_samples_per_prompt: 4
  max_turns: 8
  max_input_length: 1000
  sampling_params: {{max_generate_length: 12, stop: [a, e]}}
  max_num_seqs: 16
"""


def small_config(folder: Path, *overrides: str) -> RunConfig:
    return load_config(SETTINGS, [f"trainer.run_path={folder}", *overrides])


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
