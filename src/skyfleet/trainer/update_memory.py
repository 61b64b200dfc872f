"""What an update takes: activations, the head, and the optimizer's numbers."""

from __future__ import annotations

from skyfleet.config.root import RunConfig
from skyfleet.learner.batching import default_chunk_size
from skyfleet.learner.factory import max_tokens_per_microbatch
from skyfleet.models.shape import ModelShape
from skyfleet.trainer.memory_parts import SHORTER, Models, Part

HEAP_OVERHEAD = 1.15
"""What fragmentation adds to the many tensors of an update."""


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


def plan_activations(config: RunConfig, models: Models, shape: ModelShape) -> Part:
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
        remedies.append(SHORTER)
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


def plan_logits(config: RunConfig, models: Models, shape: ModelShape) -> Part:
    return Part(
        name="logits",
        n_bytes=count_head_bytes(config, shape, on_gpu=models.on_gpu),
        remedy="a lower trainer.loss_chunk_size",
        is_estimate=True,
    )


def count_head_bytes(
    config: RunConfig, shape: ModelShape, *, on_gpu: bool, with_gradient: bool = True
) -> int:
    """The head (`action_logprobs`): copies of one chunk's logits, and of its gradient."""
    chunk = config.trainer.loss_chunk_size or default_chunk_size(on_gpu=on_gpu)
    chunk = min(chunk, tokens_per_forward_pass(config))
    logits = 5 * chunk * shape.vocab_size * 4
    has_gradient = with_gradient and not shape.n_adapter_parameters
    head = 3 * shape.vocab_size * shape.hidden_size * 4 if has_gradient else 0
    return int(HEAP_OVERHEAD * (logits + head))


def count_optimizer_bytes(n_trained: int, *, itemsize: int) -> int:
    """Two moments, and float32 copies of other weights (`learner/optimizer.py`)."""
    return n_trained * (8 if itemsize == 4 else 12)
