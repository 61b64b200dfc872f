"""MemoryPlan: the bytes that a run takes, from its configuration and the shapes of its models.

The formulas count what the code of this repository holds, so each names the function that it
describes. docs/training_mechanics.md compares them with measured peaks.
"""

from __future__ import annotations

from skyfleet.config.policy import OptimizerConfig
from skyfleet.config.root import RunConfig
from skyfleet.models.shape import ModelShape
from skyfleet.trainer.memory_parts import (
    ENGINE_WEIGHTS,
    KV_CACHE,
    NO_CRITIC,
    PROCESS,
    PROCESS_BYTES,
    SHORTER,
    SMALLER_MODEL,
    USE_LORA,
    WEIGHTS,
    MemoryPlan,
    Models,
    Part,
)
from skyfleet.trainer.update_memory import (
    count_optimizer_bytes,
    plan_activations,
    plan_logits,
)


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
        held += [part for part in generation if part.name == KV_CACHE]
        generation = [part for part in generation if part.name != KV_CACHE]
    n_trained = policy.n_adapter_parameters or policy.n_parameters
    gradients = Part(name="gradients", n_bytes=4 * n_trained, remedy=USE_LORA)
    update = (
        gradients,
        plan_activations(config, models, policy),
        plan_logits(config, models, policy),
    )
    phases, names = [tuple(generation), update], ["rollouts", "update"]
    if config.trainer.fully_async.enabled:
        # Episodes go on during an update, on a copy of the weights.
        held += [*_engine_weights(config, models), *generation]
        phases, names = [update], ["rollouts and update"]
    if _offloads(models, config.trainer.policy.optimizer_config):
        phases.append((gradients, _onloaded(models, policy, remedy=USE_LORA)))
        names.append("optimizer step")
    if (critic := models.critic) is not None:
        gradients = Part(
            name="gradients of the critic", n_bytes=4 * critic.n_parameters, remedy=NO_CRITIC
        )
        phases.append((gradients, plan_activations(config, models, critic)))
        names.append("critic update")
        if _offloads(models, config.trainer.critic.optimizer_config):
            phases.append((gradients, _onloaded(models, critic, remedy=NO_CRITIC)))
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
    process = Part(name=PROCESS, n_bytes=PROCESS_BYTES, is_estimate=True)
    return MemoryPlan(held=(process, optimizer), phases=(tuple(_weights(models)),))


def engine_bytes_per_row(config: RunConfig, models: Models) -> int:
    """What the engine takes for each sequence that it runs at once."""
    policy = models.policy
    cache = config.max_episode_tokens * policy.kv_width * models.itemsize
    return cache + policy.vocab_size * _sampling_bytes(config)


def _process(models: Models) -> list[Part]:
    return [] if models.on_gpu else [Part(name=PROCESS, n_bytes=PROCESS_BYTES, is_estimate=True)]


def _weights(models: Models) -> list[Part]:
    if models.is_loaded:
        return []
    n_bytes = models.policy.n_parameters * models.itemsize
    remedy = SMALLER_MODEL if models.itemsize == 2 else f"trainer.bf16=true or {SMALLER_MODEL}"
    return [Part(name=WEIGHTS, n_bytes=n_bytes, remedy=remedy)]


def _engine_weights(config: RunConfig, models: Models) -> list[Part]:
    """`copy_for_engine`; other engines have their own processes."""
    if config.generator.backend != "embedded":
        return []
    n_bytes = models.policy.n_parameters * models.itemsize
    remedy = f"trainer.fully_async.enabled=false or {SMALLER_MODEL}"
    return [Part(name=ENGINE_WEIGHTS, n_bytes=n_bytes, remedy=remedy)]


def _loading(models: Models) -> list[Part]:
    """`load_model` dequantises smollm2 into float32 and copies that into a plain module."""
    if models.is_loaded or models.on_gpu or models.policy.path != "smollm2":
        return []
    return [Part(name="dequantised weights", n_bytes=4 * models.policy.n_parameters)]


def _offloads(models: Models, settings: OptimizerConfig) -> bool:
    return models.on_gpu and settings.offload_after_step


def _onloaded(models: Models, shape: ModelShape, *, remedy: str) -> Part:
    """`Optimizer.apply` brings an offloaded optimizer back to the GPU for its step."""
    adapters = shape.n_adapter_parameters
    n_bytes = count_optimizer_bytes(
        adapters or shape.n_parameters, itemsize=4 if adapters else models.itemsize
    )
    return Part(name="optimizer during its step", n_bytes=n_bytes, remedy=remedy)


def _optimizer(config: RunConfig, models: Models) -> Part:
    policy = models.policy
    offloads = _offloads(models, config.trainer.policy.optimizer_config)
    if not policy.n_adapter_parameters:
        n_bytes = count_optimizer_bytes(policy.n_parameters, itemsize=models.itemsize)
        remedy = USE_LORA
        if models.on_gpu:
            remedy += " or trainer.policy.optimizer_config.offload_after_step=true"
        return Part(name="optimizer", n_bytes=0 if offloads else n_bytes, remedy=remedy)
    # Adapters are float32; the weights that they are merged into are kept twice (`models/lora.py`).
    adapters = policy.n_adapter_parameters
    n_bytes = 4 * adapters + policy.n_adapted * models.itemsize
    if not offloads:
        n_bytes += count_optimizer_bytes(adapters, itemsize=4)
    return Part(
        name="LoRA adapters and base weights",
        n_bytes=n_bytes,
        remedy=f"a lower trainer.policy.model.lora.rank or {SMALLER_MODEL}",
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
        n_bytes += count_optimizer_bytes(critic.n_parameters, itemsize=models.itemsize)
    return Part(name="critic and its optimizer", n_bytes=n_bytes, remedy=NO_CRITIC)


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
            name=KV_CACHE,
            n_bytes=cache,
            remedy=f"a lower generator.max_num_seqs or {SHORTER}" if rows > 1 else SHORTER,
        ),
        Part(
            name="prefill",
            n_bytes=tokens * layer * models.itemsize + mask,
            remedy=f"a lower generator.max_num_batched_tokens or {SHORTER}",
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
