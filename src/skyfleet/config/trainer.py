"""Trainer: the models, the algorithm, the training loop and its outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from skyfleet.config.algorithm import Algorithm
from skyfleet.config.fully_async import FullyAsync
from skyfleet.config.policy import Critic, Policy, Ref
from skyfleet.config.section import PositiveOrMinusOne, Section, as_list
from skyfleet.config.tracking import Alerts, Logger, Prometheus, Wandb


class Placement(Section):
    use_ray: bool = False
    """Run episodes, engines and learner ranks as Ray actors, placed by this section, on this machine or \
on the cluster of RAY_ADDRESS. SkyRL has no such key: it always uses Ray."""
    ready_timeout_seconds: float = Field(180.0, gt=0)
    """How long to wait for the cluster's GPUs and CPUs, and for the actors to start. SkyRL's is the \
variable SKYRL_RAY_PG_TIMEOUT_IN_S."""
    colocate_all: bool = True
    """Learner and engines share their GPUs."""
    colocate_policy_ref: bool = True
    """The reference model shares the policy's GPUs."""
    policy_num_nodes: int = Field(1, ge=1)
    policy_num_gpus_per_node: int = Field(1, ge=1)
    """SkyRL's default is 1; in older versions it was 4."""
    ref_num_nodes: int = Field(1, ge=1)
    ref_num_gpus_per_node: int = Field(1, ge=1)
    critic_num_nodes: int = Field(1, ge=1)
    critic_num_gpus_per_node: int = Field(1, ge=1)
    rank_timeout_seconds: float = Field(1800.0, gt=0)
    """With trainer.strategy=fsdp: how long an update, a load or a save may take before its ranks count \
as lost."""


class RopeScaling(Section):
    rope_type: Literal["yarn"] = "yarn"
    """The section is null, and the model keeps its own context, unless one of its keys is set."""
    factor: float = Field(2.0, gt=1)
    """Ratio of the new context length to the original one."""
    original_max_position_embeddings: int = Field(32768, ge=1)
    """Tokens; the context length the model was trained with."""


class WarmStart(Section):
    """SFT steps on reference solutions before the first RL step."""

    steps: int = Field(0, ge=0)
    """Optimiser steps; 0 disables SFT."""
    batch_size: int = Field(32, ge=1)
    """Episodes per optimiser step."""
    lr: float = Field(3e-3, gt=0)
    tasks: PositiveOrMinusOne = -1
    """How many training tasks to use; -1 uses all."""


def _read_off(value: Any) -> Any:
    """YAML parses a bare `off` as false."""
    return "off" if value is False else value


Mode = Annotated[Literal["stop", "warn", "off"], BeforeValidator(_read_off)]


class Sentinels(Section):
    """Runtime invariant checks."""

    mode: Mode = "stop"
    """stop ends the run when an invariant is violated, and only warns about a suspicious trend; warn \
only warns; off disables all checks."""
    modes: dict[str, Mode] = Field({})
    """Mode per sentinel name, instead of `mode`."""


class Trainer(Section):
    policy: Policy = Policy()
    ref: Ref = Ref()
    critic: Critic = Critic()
    algorithm: Algorithm = Algorithm()
    warm_start: WarmStart = WarmStart()
    sentinels: Sentinels = Sentinels()
    placement: Placement = Placement()
    fully_async: FullyAsync = FullyAsync()
    rope_scaling: RopeScaling | None = None
    strategy: Literal["single", "fsdp", "megatron"] = "single"
    """single trains on one device, fsdp on all ranks that torchrun starts. SkyRL's default is fsdp."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses CUDA if it is available."""
    seed: int = Field(42, ge=0)
    bf16: bool | Literal["auto"] = "auto"
    """auto: bfloat16 on CUDA, float32 on a CPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory. SkyRL's default is true."""
    loss_chunk_size: int | None = Field(None, ge=1)
    """Tokens whose logits are in memory at once; null chooses by device."""

    epochs: int = Field(20, ge=1)
    """Passes over the training tasks. Fleet's value; SkyRL's default is 1."""
    max_training_steps: int | None = Field(None, ge=1)
    """Stop after so many steps, even inside an epoch."""
    train_batch_size: int = Field(4, ge=1)
    """Prompts per step. Fleet's value for 1.5B; SkyRL's default is 1024."""
    policy_mini_batch_size: int = Field(4, ge=1)
    """Prompts per optimiser step. Fleet's value for 1.5B; SkyRL's default is 256."""
    critic_mini_batch_size: int = Field(4, ge=1)
    """Prompts per optimiser step of the critic. SkyRL's default is 256."""
    update_epochs_per_batch: int = Field(1, ge=1)
    """Passes over each batch."""
    micro_train_batch_size_per_gpu: int = Field(1, ge=1)
    """Sequences per forward and backward pass."""
    max_tokens_per_microbatch: PositiveOrMinusOne = -1
    """Fill each micro-batch up to so many tokens instead; -1 counts sequences."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Tokens; tasks whose own prompt is longer are dropped and counted, as in SkyRL. null keeps all; \
SkyRL's default is 512."""
    use_hybrid_env_sampling: bool = True
    """Sample from every environment in every batch."""
    min_samples_per_env: int = Field(1, ge=0)
    """Prompts per environment in each batch."""
    curriculum: bool = False
    """Sample tasks with a mixed recent pass rate more often, and those always or never solved less \
often."""
    update_ref_every_epoch: bool = False
    """Set the reference model to the policy after each epoch; that checkpoint is kept."""

    eval_before_train: bool = True
    """Evaluate at step 0."""
    eval_interval: PositiveOrMinusOne = 5
    """Steps between evaluations; -1 disables them."""
    eval_batch_size: int | None = Field(None, ge=1)
    """Evaluation prompts that are attempted at once; null bounds episodes by generator.max_num_seqs \
alone. SkyRL's default is 1024."""

    ckpt_interval: PositiveOrMinusOne = 10
    """Steps between checkpoints; -1 saves only at the end."""
    max_ckpts_to_keep: PositiveOrMinusOne = -1
    """-1 keeps all."""
    hf_save_interval: PositiveOrMinusOne = -1
    """Steps between exports to export_path/global_step_N/policy; -1 disables them. Checkpoints are in \
Hugging Face's format too."""
    resume_mode: Literal["none", "latest", "from_path"] = "latest"
    """null is none."""
    resume_path: str | None = None
    """A checkpoint folder, `global_step_N`."""
    resume_strict: bool = False
    """Stop if the newest checkpoint is damaged, instead of resuming from the one before it."""
    journal: bool = True
    """Record finished training episodes, so that a killed run does not play them again."""

    ckpt_bucket: str | None = Field(None, min_length=1)
    """Upload checkpoints to {bucket}/{project_name}/{model}/{run_name}/global_step_N and resume from \
there: a bucket in S3, or s3://, gs:// or az:// with its name, or a path that starts with / or ."""
    trajectory_bucket: str | None = Field(None, min_length=1)
    """Upload evaluation dumps to {bucket}/evals/{run_name}/global_step_N and the run folder without \
its checkpoints to {bucket}/runs/{run_name}."""
    ckpt_upload_check: Literal["read_back", "checksum"] = "read_back"
    """read_back downloads and hashes every uploaded file; checksum lets S3 compare a SHA-256 of every \
part, which AWS does and other servers may not."""
    upload_timeout_seconds: float = Field(1800.0, ge=0)
    """How long the end of a run waits for its uploads, also after SIGTERM."""

    project_name: str = "skyfleet"
    run_name: str = Field("test_run", min_length=1)
    run_path: str = "runs/test_run"
    """The folder of the run."""
    ckpt_path: str = "runs/test_run/checkpoints"
    """SkyRL's default is ~/ckpts/, where a run could resume from another run's checkpoint."""
    export_path: str = "runs/test_run/exports"
    logger: Annotated[list[Logger], BeforeValidator(as_list)] = Field(["console"])
    """One or more; metrics.jsonl is always written. SkyRL's default is wandb."""
    wandb: Wandb = Wandb()
    alerts: Alerts = Alerts()
    prometheus: Prometheus = Prometheus()
    tracing: bool = False
    """Export spans of every episode (queue, engine, environment, verifier) with OpenTelemetry, to \
OTEL_EXPORTER_OTLP_ENDPOINT."""
    print_example_interval: PositiveOrMinusOne = -1
    """Steps between printed example episodes; -1 disables them."""
    dump_data_batch: bool = False
    """Pickle each training batch to export_path/dumped_data."""
    dump_eval_results: bool = True
    """Save the evaluation episodes."""
    dump_training_trajectories: bool = False
    """Also write the training episodes to export_path/dumped_training_trajectories, as JSON lines."""

    def find_problems(self) -> Iterator[str]:
        batch, mini = self.train_batch_size, self.policy_mini_batch_size
        if mini > batch:
            yield (
                f"trainer.policy_mini_batch_size={mini} is larger than "
                f"trainer.train_batch_size={batch}; "
                f"set trainer.policy_mini_batch_size to a divisor of {batch}"
            )
        elif batch % mini:
            yield (
                f"trainer.train_batch_size={batch} is not a multiple of "
                f"trainer.policy_mini_batch_size={mini}; "
                f"set trainer.train_batch_size to {batch - batch % mini}"
            )
        yield from self.fully_async.find_conflicts(batch)
        if self.resume_mode == "from_path" and not self.resume_path:
            yield "trainer.resume_mode=from_path needs trainer.resume_path; set it or use latest"
        path = self.ref.model.path
        if self.update_ref_every_epoch and path != self.policy.model.path:
            yield (
                f"trainer.update_ref_every_epoch=true, but trainer.ref.model.path={path!r} is another "
                "model than the policy; set it to false or leave trainer.ref.model.path out"
            )
        yield from self._find_rope_problems()

    def count_kept_checkpoints(self, *, uploads: bool) -> int | None:
        """Checkpoints on the disk at once, beside one that is being written; None: all of them."""
        # Those of step 0, of the best step and of a renewed KL reference stay.
        protected = 3 if self.update_ref_every_epoch else 2
        # Of uploaded checkpoints the newest stays, and the one before it until the newest is uploaded.
        limits = [2 + protected] if uploads else []
        if self.max_ckpts_to_keep > 0:
            limits.append(self.max_ckpts_to_keep + protected)
        return min(limits, default=None)

    def _find_rope_problems(self) -> Iterator[str]:
        if self.rope_scaling is None:
            return
        if self.policy.model.path == "tiny":
            yield (
                "trainer.rope_scaling extends the context of a trained model, and "
                "trainer.policy.model.path=tiny is built with any context; set "
                "trainer.policy.model_config_kwargs.max_position_embeddings"
            )
        if "rope_parameters" in self.policy.model_config_kwargs:
            yield (
                "trainer.rope_scaling and trainer.policy.model_config_kwargs.rope_parameters both "
                "extend the context; keep one"
            )
