"""MemoryPlan: the bytes that a run takes, from its configuration and the shapes of its models.

The formulas count what the code of this repository holds, so each names the function that it
describes. docs/training_mechanics.md compares them with measured peaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyfleet.config.policy import OptimizerConfig
from skyfleet.config.root import RunConfig
from skyfleet.learner.batching import default_chunk_size
from skyfleet.learner.factory import max_tokens_per_microbatch
from skyfleet.models.shape import ModelShape

MIB = 2**20
PROCESS_BYTES = 300 * MIB
"""Tasks, trajectories, tokenizers and what the allocator keeps, beyond what is loaded at the start."""

HEAP_OVERHEAD = 1.15
"""What fragmentation adds to the many tensors of an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One use of memory, and the settings that lower it."""

    name: str
    n_bytes: int
    remedy: str = ""
    is_estimate: bool = False
    """Less may do, such as shorter sequences or less fragmentation than expected."""

    @property
    def least_bytes(self) -> int:
        return self.n_bytes * 3 // 4 if self.is_estimate else self.n_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What is held all the time, and what each phase adds; phases do not overlap."""

    held: tuple[Part, ...]
    phases: tuple[tuple[Part, ...], ...]
    phase_names: tuple[str, ...] = ()
    """Of a training run, one per phase."""

    @property
    def peak_parts(self) -> tuple[Part, ...]:
        """The parts of the phase that takes most."""
        return (*self.held, *max(self.phases, key=_total))

    @property
    def peak_bytes(self) -> int:
        return _total(self.peak_parts)

    @property
    def least_bytes(self) -> int:
        """What a run takes at its peak if every estimate is too high."""
        phases = [sum(part.least_bytes for part in phase) for phase in self.phases]
        return sum(part.least_bytes for part in self.held) + max(phases)

    @property
    def generation_bytes(self) -> int:
        """At the peak of the first phase."""
        return _total(self.held) + _total(self.phases[0])

    @property
    def learner_bytes(self) -> int:
        """Everything except the process, the weights and the engine."""
        others = (_PROCESS, _WEIGHTS, _ENGINE_WEIGHTS, _KV_CACHE)
        held = [part for part in self.held if part.name not in others]
        return _total(held) + max(map(_total, self.phases))


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The shapes of the models of a run, and how their numbers are stored."""

    policy: ModelShape
    reference: ModelShape | None = None
    critic: ModelShape | None = None
    on_gpu: bool = False
    itemsize: int = 4
    """Bytes per weight and activation: 2 in bfloat16."""
    is_loaded: bool = False
    """The policy's weights are in memory already."""


def plan_training(config: RunConfig, models: Models, *, rows: int) -> MemoryPlan:
    """The plan of a training run whose engine holds `rows` sequences."""
    policy = models.policy
    held = [*_process(models), *_weights(models), _optimizer(config, models)]
    if models.reference is not None:
        held.append(_reference(config, models, models.reference))
    if models.critic is not None:
        held.append(_critic(config, models, models.critic))
    generation = _generation(config, models, rows=rows)
    if models.on_gpu:
        # The paged cache stays while the learner works.
        held += [part for part in generation if part.name == _KV_CACHE]
        generation = [part for part in generation if part.name != _KV_CACHE]
    n_trained = policy.n_adapter_parameters or policy.n_parameters
    gradients = Part(name="gradients", n_bytes=4 * n_trained, remedy=_USE_LORA)
    update = (gradients, _activations(config, models, policy), _logits(config, models, policy))
    phases, names = [tuple(generation), update], ["rollouts", "update"]
    if config.trainer.fully_async.enabled:
        # Episodes go on during an update, on a copy of the weights.
        held += [*_engine_weights(config, models), *generation]
        phases, names = [update], ["rollouts and update"]
    if _offloads(models, config.trainer.policy.optimizer_config):
        phases.append((gradients, _onloaded(models, policy, remedy=_USE_LORA)))
        names.append("optimizer step")
    if (critic := models.critic) is not None:
        gradients = Part(
            name="gradients of the critic", n_bytes=4 * critic.n_parameters, remedy=_NO_CRITIC
        )
        phases.append((gradients, _activations(config, models, critic)))
        names.append("critic update")
        if _offloads(models, config.trainer.critic.optimizer_config):
            phases.append((gradients, _onloaded(models, critic, remedy=_NO_CRITIC)))
            names.append("critic optimizer step")
    return MemoryPlan(held=tuple(held), phases=tuple(phases), phase_names=tuple(names))


def plan_inference(config: RunConfig, models: Models, *, rows: int) -> MemoryPlan:
    """The plan of an engine without a learner."""
    return MemoryPlan(
        held=(*_process(models), *_weights(models)),
        phases=(tuple(_generation(config, models, rows=rows)), tuple(_loading(models))),
    )


def plan_host(config: RunConfig, models: Models) -> MemoryPlan:
    """The plan of the machine's own memory if the models are on a GPU."""
    policy, offloaded = models.policy, 0
    for shape, settings in (
        (policy, config.trainer.policy.optimizer_config),
        (models.critic, config.trainer.critic.optimizer_config),
    ):
        if shape is not None and settings.offload_after_step:
            offloaded += 12 * (shape.n_adapter_parameters or shape.n_parameters)
    optimizer = Part(
        name="offloaded optimizer",
        n_bytes=offloaded,
        remedy="trainer.policy.optimizer_config.offload_after_step=false",
    )
    process = Part(name=_PROCESS, n_bytes=PROCESS_BYTES, is_estimate=True)
    return MemoryPlan(held=(process, optimizer), phases=(tuple(_weights(models)),))


def engine_bytes_per_row(config: RunConfig, models: Models) -> int:
    """What the engine takes for each sequence that it runs at once."""
    policy = models.policy
    cache = config.max_episode_tokens * policy.kv_width * models.itemsize
    return cache + policy.vocab_size * _sampling_bytes(config)


def tokens_per_forward_pass(config: RunConfig) -> int:
    """The most tokens of one forward and backward pass: a micro-batch, or its longest sequence."""
    trainer, longest = config.trainer, config.max_episode_tokens
    tokens = max(max_tokens_per_microbatch(config), longest)
    if config.generator.step_wise_trajectories:
        return tokens
    sequences = trainer.policy_mini_batch_size * config.generator.n_samples_per_prompt
    if trainer.warm_start.steps:
        sequences = max(sequences, trainer.warm_start.batch_size)
    return min(tokens, sequences * longest)


_KV_CACHE, _PROCESS, _WEIGHTS = "KV cache", "process", "weights"
_ENGINE_WEIGHTS = "the engine's copy of the weights"
_SMALLER_MODEL = "a smaller model in trainer.policy.model.path"
_USE_LORA = f"trainer.policy.model.lora.rank=16 or {_SMALLER_MODEL}"
_NO_CRITIC = "trainer.algorithm.advantage_estimator=grpo instead of a critic, or a smaller model in trainer.critic.model.path"
_SHORTER = "a lower generator.max_input_length"


def _process(models: Models) -> list[Part]:
    return [] if models.on_gpu else [Part(name=_PROCESS, n_bytes=PROCESS_BYTES, is_estimate=True)]


def _weights(models: Models) -> list[Part]:
    if models.is_loaded:
        return []
    n_bytes = models.policy.n_parameters * models.itemsize
    remedy = _SMALLER_MODEL if models.itemsize == 2 else f"trainer.bf16=true or {_SMALLER_MODEL}"
    return [Part(name=_WEIGHTS, n_bytes=n_bytes, remedy=remedy)]


def _engine_weights(config: RunConfig, models: Models) -> list[Part]:
    """`copy_for_engine`; other engines have their own processes."""
    if config.generator.backend != "embedded":
        return []
    n_bytes = models.policy.n_parameters * models.itemsize
    remedy = f"trainer.fully_async.enabled=false or {_SMALLER_MODEL}"
    return [Part(name=_ENGINE_WEIGHTS, n_bytes=n_bytes, remedy=remedy)]


def _loading(models: Models) -> list[Part]:
    """`load_model` dequantises smollm2 into float32 and copies that into a plain module."""
    if models.is_loaded or models.on_gpu or models.policy.path != "smollm2":
        return []
    return [Part(name="dequantised weights", n_bytes=4 * models.policy.n_parameters)]


def _optimizer_bytes(n_trained: int, *, itemsize: int) -> int:
    """Two moments, and float32 copies of other weights (`learner/optimizer.py`)."""
    return n_trained * (8 if itemsize == 4 else 12)


def _offloads(models: Models, settings: OptimizerConfig) -> bool:
    return models.on_gpu and settings.offload_after_step


def _onloaded(models: Models, shape: ModelShape, *, remedy: str) -> Part:
    """`Optimizer.apply` brings an offloaded optimizer back to the GPU for its step."""
    adapters = shape.n_adapter_parameters
    n_bytes = _optimizer_bytes(
        adapters or shape.n_parameters, itemsize=4 if adapters else models.itemsize
    )
    return Part(name="optimizer during its step", n_bytes=n_bytes, remedy=remedy)


def _optimizer(config: RunConfig, models: Models) -> Part:
    policy = models.policy
    offloads = _offloads(models, config.trainer.policy.optimizer_config)
    if not policy.n_adapter_parameters:
        n_bytes = _optimizer_bytes(policy.n_parameters, itemsize=models.itemsize)
        remedy = _USE_LORA
        if models.on_gpu:
            remedy += " or trainer.policy.optimizer_config.offload_after_step=true"
        return Part(name="optimizer", n_bytes=0 if offloads else n_bytes, remedy=remedy)
    # Adapters are float32; the weights that they are merged into are kept twice (`models/lora.py`).
    adapters = policy.n_adapter_parameters
    n_bytes = 4 * adapters + policy.n_adapted * models.itemsize
    if not offloads:
        n_bytes += _optimizer_bytes(adapters, itemsize=4)
    return Part(
        name="LoRA adapters and base weights",
        n_bytes=n_bytes,
        remedy=f"a lower trainer.policy.model.lora.rank or {_SMALLER_MODEL}",
    )


def _reference(config: RunConfig, models: Models, reference: ModelShape) -> Part:
    trainer = config.trainer
    # The base weights of an adapted policy are the reference (`learner/factory.py`).
    uses_policy_base = (
        trainer.policy.model.lora.rank
        and trainer.ref.model.path == trainer.policy.model.path
        and not (trainer.warm_start.steps or trainer.update_ref_every_epoch)
    )
    return Part(
        name="reference model",
        n_bytes=0 if uses_policy_base else reference.n_parameters * models.itemsize,
        remedy="trainer.algorithm.use_kl_loss=false and use_kl_in_reward=false, or a smaller model in trainer.ref.model.path",
    )


def _critic(config: RunConfig, models: Models, critic: ModelShape) -> Part:
    n_bytes = critic.n_parameters * models.itemsize
    if not _offloads(models, config.trainer.critic.optimizer_config):
        n_bytes += _optimizer_bytes(critic.n_parameters, itemsize=models.itemsize)
    return Part(name="critic and its optimizer", n_bytes=n_bytes, remedy=_NO_CRITIC)


def _generation(config: RunConfig, models: Models, *, rows: int) -> list[Part]:
    """The embedded engine; other engines have their own processes."""
    if config.generator.backend != "embedded":
        return []
    policy, longest = models.policy, config.max_episode_tokens
    if models.on_gpu:
        rows = min(rows, 1)  # the CUDA engine's pool takes what is left, but one sequence must fit
    cache = rows * longest * policy.kv_width * models.itemsize
    tokens = min(config.generator.max_num_batched_tokens, rows * longest)
    layer = 4 * policy.intermediate_size + 8 * policy.hidden_size
    mask = 5 * min(tokens, longest) * longest
    sampling = rows * policy.vocab_size * _sampling_bytes(config)
    return [
        Part(
            name=_KV_CACHE,
            n_bytes=cache,
            remedy=f"a lower generator.max_num_seqs or {_SHORTER}" if rows > 1 else _SHORTER,
        ),
        Part(
            name="prefill",
            n_bytes=tokens * layer * models.itemsize + mask,
            remedy=f"a lower generator.max_num_batched_tokens or {_SHORTER}",
            is_estimate=True,
        ),
        Part(
            name="sampling",
            n_bytes=sampling,
            remedy="a lower generator.max_num_seqs",
            is_estimate=True,
        ),
    ]


def _sampling_bytes(config: RunConfig) -> int:
    """Per row and vocabulary entry (`engines/sampler.py`): logits, probabilities, their sums in
    float64, and with truncation the sorted ones with their order."""
    generator = config.generator
    truncates = generator.sampling_params.truncates or generator.eval_sampling_params.truncates
    return 48 if truncates else 20


def _activations(config: RunConfig, models: Models, shape: ModelShape) -> Part:
    """What the backward pass needs of `Decoder.hidden`."""
    tokens = tokens_per_forward_pass(config)
    recomputes = config.trainer.gradient_checkpointing
    n_numbers = tokens * activations_per_token(shape, recomputes=recomputes)
    remedies = [] if recomputes else ["trainer.gradient_checkpointing=true"]
    if tokens > config.max_episode_tokens:
        trainer = config.trainer
        by_tokens = trainer.max_tokens_per_microbatch > 0
        remedies.append(
            "a lower trainer.max_tokens_per_microbatch"
            if by_tokens
            else "a lower trainer.micro_train_batch_size_per_gpu"
        )
    else:
        remedies.append(_SHORTER)
    return Part(
        name="activations",
        n_bytes=int(HEAP_OVERHEAD * n_numbers * models.itemsize),
        remedy=" or ".join(remedies),
        is_estimate=True,
    )


def activations_per_token(shape: ModelShape, *, recomputes: bool) -> int:
    """Numbers per token that are saved for the backward pass, measured with
    `torch.autograd.graph.saved_tensors_hooks`."""
    hidden, wide = shape.hidden_size, shape.intermediate_size
    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    layer = 4 * wide + 6 * hidden + 3 * q + 2 * kv + 2 * (q + kv if shape.has_qk_norm else 0)
    if not recomputes:
        return shape.n_layers * layer + 2 * hidden
    # The input of each layer, and one layer with the gradients inside it.
    return (shape.n_layers + 2) * hidden + layer + 3 * wide + 4 * hidden


def _logits(config: RunConfig, models: Models, shape: ModelShape) -> Part:
    """The head (`action_logprobs`): copies of one chunk's logits, and of its gradient."""
    chunk = config.trainer.loss_chunk_size or default_chunk_size(on_gpu=models.on_gpu)
    chunk = min(chunk, tokens_per_forward_pass(config))
    logits = 5 * chunk * shape.vocab_size * 4
    head = 0 if shape.n_adapter_parameters else 3 * shape.vocab_size * shape.hidden_size * 4
    n_bytes = int(HEAP_OVERHEAD * (logits + head))
    remedy = "a lower trainer.loss_chunk_size"
    return Part(name="logits", n_bytes=n_bytes, remedy=remedy, is_estimate=True)


def _total(parts: Sequence[Part]) -> int:
    return sum(part.n_bytes for part in parts)
