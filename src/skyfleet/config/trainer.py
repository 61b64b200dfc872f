"""Trainer: the loop, its batches, and what it leaves behind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from skyfleet.config.algorithm import Algorithm
from skyfleet.config.critic import Critic
from skyfleet.config.policy import Policy, Ref
from skyfleet.config.section import PositiveOrMinusOne, Section, listed
from skyfleet.config.sentinels import Sentinels

Logger = Literal["console", "jsonl", "tensorboard", "wandb"]


class Placement(Section):
    colocate_all: bool = True
    """Learner and engines share their GPUs."""
    colocate_policy_ref: bool = True
    policy_num_nodes: int = Field(1, ge=1)
    policy_num_gpus_per_node: int = Field(1, ge=1)
    """SkyRL's default was 4 until it became 1."""
    ref_num_nodes: int = Field(1, ge=1)
    ref_num_gpus_per_node: int = Field(1, ge=1)


class RopeScaling(Section):
    rope_type: Literal["yarn"] = "yarn"
    """The section is null, and the model keeps its own context, until one of its keys is set."""
    factor: float = Field(2.0, gt=1)
    """How many times longer the context becomes."""
    original_max_position_embeddings: int = Field(32768, ge=1)
    """Tokens; the context the model was trained with."""


class WarmStart(Section):
    """Supervised steps on reference solutions before the first reinforced one."""

    steps: int = Field(0, ge=0)
    """Optimiser steps; 0 switches it off."""
    batch_size: int = Field(32, ge=1)
    """Episodes an optimiser step."""
    lr: float = Field(3e-3, gt=0)
    tasks: PositiveOrMinusOne = -1
    """How many training tasks it may see; -1 all."""


class Trainer(Section):
    policy: Policy = Policy()
    ref: Ref = Ref()
    critic: Critic = Critic()
    algorithm: Algorithm = Algorithm()
    warm_start: WarmStart = WarmStart()
    sentinels: Sentinels = Sentinels()
    placement: Placement = Placement()
    rope_scaling: RopeScaling | None = None
    strategy: Literal["single", "fsdp", "megatron"] = "single"
    """single trains on one device; SkyRL's default is fsdp."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA when there is one."""
    seed: int = Field(42, ge=0)
    bf16: bool | Literal["auto"] = "auto"
    """auto: bfloat16 on CUDA, float32 on a CPU, which is seldom fast in bfloat16."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory. SkyRL's default is true."""
    flash_attn: bool = True
    """FlashAttention 2 rather than PyTorch's own."""
    remove_microbatch_padding: bool = True
    """Pack sequences end to end rather than pad them."""
    loss_chunk_size: int | None = Field(None, ge=1)
    """Tokens of logits held at once; null lets the device choose."""

    epochs: int = Field(20, ge=1)
    """Passes over the training tasks: Fleet's recipe; SkyRL's default is 1."""
    max_training_steps: int | None = Field(None, ge=1)
    """Stop here even inside an epoch."""
    train_batch_size: int = Field(4, ge=1)
    """Prompts a step: Fleet's recipe for 1.5B; SkyRL's default is 1024."""
    policy_mini_batch_size: int = Field(4, ge=1)
    """Prompts an optimiser step: Fleet's recipe for 1.5B; SkyRL's default is 256."""
    critic_mini_batch_size: int = Field(4, ge=1)
    """The same for the critic; SkyRL's default is 256."""
    update_epochs_per_batch: int = Field(1, ge=1)
    micro_train_batch_size_per_gpu: int = Field(1, ge=1)
    """Sequences a forward and backward pass."""
    micro_forward_batch_size_per_gpu: int = Field(1, ge=1)
    """Sequences a pass that only computes log-probabilities; no effect here, there is none."""
    max_tokens_per_microbatch: PositiveOrMinusOne = -1
    """Fill micro-batches up to so many tokens instead; -1 counts sequences."""
    max_prompt_length: int = Field(512, ge=1)
    """Tokens of a task's opening."""
    use_hybrid_env_sampling: bool = True
    """Every batch draws from every environment."""
    min_samples_per_env: int = Field(1, ge=0)
    """Prompts of each environment in a batch."""
    curriculum: bool = False
    """Draw oftener what has lately been solved sometimes, seldom what always or never is."""
    update_ref_every_epoch: bool = False
    """The reference becomes the policy after each epoch; its checkpoint is kept for that."""

    eval_batch_size: int = Field(1024, ge=1)
    """Prompts evaluated at once; no effect here, generator.max_num_seqs decides."""
    eval_before_train: bool = True
    eval_interval: PositiveOrMinusOne = 5
    """Steps; -1 never."""

    ckpt_interval: PositiveOrMinusOne = 10
    """Steps; -1 only at the end."""
    max_ckpts_to_keep: PositiveOrMinusOne = -1
    """-1 keeps all."""
    hf_save_interval: PositiveOrMinusOne = -1
    """Steps between exports to export_path/global_step_N/policy; -1 never. Checkpoints are in
    Hugging Face's format too."""
    resume_mode: Literal["none", "latest", "from_path"] = "latest"
    resume_path: str | None = None
    """A checkpoint folder, `global_step_N`."""

    project_name: str = "skyfleet"
    run_name: str = Field("test_run", min_length=1)
    run_path: str = "runs/test_run"
    """The folder of the run."""
    ckpt_path: str = "runs/test_run/checkpoints"
    """SkyRL's default is ~/ckpts/, where runs would resume each other's checkpoints."""
    export_path: str = "runs/test_run/exports"
    logger: Annotated[list[Logger], BeforeValidator(listed)] = Field(["console"])
    """One or several; jsonl is always written. SkyRL's default is wandb."""
    print_example_interval: PositiveOrMinusOne = -1
    """Steps between printed example episodes; -1 never."""
    dump_data_batch: bool = False
    """Pickle each training batch to export_path/dumped_data."""
    dump_eval_results: bool = True
    """Keep the evaluation episodes."""
    dump_training_trajectories: bool = False
    """Write the training episodes to export_path/dumped_training_trajectories too, as JSON lines."""
