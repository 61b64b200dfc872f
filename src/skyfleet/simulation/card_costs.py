"""Costs of a model on many GPUs of one card, from its bytes and FLOP and the card's profile.

Formulas count what the code does: vLLM decodes at the speed of memory, prefill and training at a share
of the matrix products' speed, FSDP2 gathers each layer twice per micro-batch and sums gradients in
float32. docs/scaling_plan.md compares them with the measured tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from skyfleet.models.shape import ModelShape
from skyfleet.simulation.card_profile import CardProfile
from skyfleet.simulation.placement import Placement

GIB = 2**30
_VLLM_BYTES = 4 * GIB
"""CUDA graphs, activations and the process of an engine, per GPU; assumed."""
_OPTIMIZER_BYTES = 28
"""That a step of AdamW reads and writes per weight: gradient, master, two moments."""


def dense_parameters(shape: ModelShape) -> int:
    """Weights that one token is multiplied with, without embedding and head."""
    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    attention = 2 * shape.hidden_size * (q + kv)
    return shape.n_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)


def count_expert_share(shape: ModelShape) -> tuple[int, float]:
    """The weights of all experts, and the share of them that one token uses; 0 and 1 without experts."""
    embeddings = 2 * shape.vocab_size * shape.hidden_size
    used = 3 * shape.n_layers * shape.hidden_size * shape.intermediate_size
    experts = shape.n_parameters - embeddings - (dense_parameters(shape) - used)
    return (experts, used / experts) if experts > 1.5 * used else (0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardEngineCosts:
    """`EngineCosts` of vLLM on `placement.engine_tensor` GPUs."""

    profile: CardProfile
    shape: ModelShape
    placement: Placement
    weight_bytes: float
    """Per weight: 2 in bfloat16, 1 in FP8."""
    memory_share: float
    """`generator.gpu_memory_utilization`."""
    max_running: int

    @property
    def kv_tokens(self) -> float:
        memory = self.profile.numbers.memory_gib.value * GIB * self.memory_share
        weights = self.shape.n_parameters * self.weight_bytes / self.placement.engine_tensor
        left = memory - weights - _VLLM_BYTES
        return max(1.0, left * self._kv_ranks / (2 * self.shape.kv_width))

    @property
    def context_seconds(self) -> float:
        bandwidth = self.profile.numbers.memory_bandwidth.value
        return 2 * self.shape.kv_width / (bandwidth * self._kv_ranks)

    def step_seconds(self, n_running: int) -> float:
        numbers, shape, n_ranks = self.profile.numbers, self.shape, self.placement.engine_tensor
        experts, share = count_expert_share(shape)
        # Of all experts, those that at least one of the tokens uses are read.
        unread = experts * (1 - share) ** n_running
        embedding = shape.vocab_size * shape.hidden_size
        n_read = shape.n_parameters - embedding - unread
        reading = n_read * self.weight_bytes / (n_ranks * numbers.memory_bandwidth.value)
        flop = 2 * (dense_parameters(shape) + embedding) * n_running
        computing = flop / (n_ranks * numbers.matmul_flops.value)
        collectives = 2 * shape.n_layers * numbers.collective_seconds.value if n_ranks > 1 else 0.0
        return max(reading, computing) + numbers.decode_fixed_seconds.value + collectives

    def prefill_seconds(self, n_new: int, n_before: int) -> float:
        numbers, shape = self.profile.numbers, self.shape
        attention = attention_flop(shape, n_before + n_new) - attention_flop(shape, n_before)
        flop = 2 * dense_parameters(shape) * n_new + attention
        speed = numbers.matmul_flops.value * numbers.prefill_share.value
        return flop / (speed * self.placement.engine_tensor)

    @property
    def _kv_ranks(self) -> int:
        """More GPUs than heads hold copies of the same heads."""
        return min(self.placement.engine_tensor, self.shape.n_kv_heads)


def attention_flop(shape: ModelShape, n_tokens: int) -> float:
    """Of a causal forward pass over one sequence."""
    return 2.0 * n_tokens * n_tokens * shape.n_heads * shape.head_dim * shape.n_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class CardStepCosts:
    """`StepCosts` of an FSDP2 learner and of weights sent to vLLM."""

    profile: CardProfile
    shape: ModelShape
    placement: Placement
    micro_tokens: int
    """Per forward pass of a data rank."""
    n_mini_batches: int
    n_extra_forwards: int
    """Old logprobs, and those of a reference model."""
    recomputes: bool
    offloads: bool
    """The optimizer is in the machine's memory between steps."""
    engine_slowdown: float = 1.0
    learner_slowdown: float = 1.0
    recomputes_cache: bool = True
    """vLLM's after new weights."""

    def fixed_seconds(self, n_tokens: int) -> float:
        return n_tokens * self.profile.numbers.fixed_token_seconds.value

    def update_seconds(self, lengths: Sequence[int]) -> float:
        tokens, squares = _share_longest(lengths, self.placement.data_ranks)
        n_passes = max(self.n_mini_batches, -(-tokens // max(1, self.micro_tokens)))
        forward, backward = self._compute_seconds(tokens, squares)
        gathering = self._gather_seconds()
        inside = self._layer_collective_seconds(tokens)
        # A layer is gathered while the one before computes.
        extra = self.n_extra_forwards * max(forward + inside, n_passes * gathering)
        training = max(forward + backward + 3 * inside, n_passes * self._train_link_seconds())
        return extra + training + self.n_mini_batches * self._optimizer_seconds()

    @property
    def push_seconds(self) -> float:
        numbers, placement = self.profile.numbers, self.placement
        n_bytes = 2 * self.shape.n_parameters
        if placement.is_colocated:
            copy = n_bytes / placement.engine_tensor / numbers.memory_bandwidth.value
            return self._gather_seconds() + copy + numbers.sleep_seconds.value
        bandwidth = self._bandwidth(placement.n_gpus)
        return numbers.push_fixed_seconds.value + self._gather_seconds() + n_bytes / bandwidth

    def _compute_seconds(self, n_tokens: int, squares: float) -> tuple[float, float]:
        """Of the forward and the backward pass of a data rank, with recomputation in the latter."""
        numbers, shape, lora = self.profile.numbers, self.shape, self.shape.n_adapter_parameters
        share = numbers.train_lora_share if lora else numbers.train_dense_share
        if count_expert_share(shape)[0]:
            share = numbers.train_moe_share
        flops = numbers.matmul_flops.value * self.placement.tensor * self.placement.context
        head = shape.vocab_size * shape.hidden_size
        dense = 2.0 * (dense_parameters(shape) + head) * n_tokens / (share.value * flops)
        attention = (
            attention_flop(shape, 1) * squares / (numbers.train_attention_share.value * flops)
        )
        again = 1 if self.recomputes else 0
        return dense + attention, dense * ((1 if lora else 2) + again) + attention * (2.5 + again)

    def _gather_seconds(self) -> float:
        """All weights once, in bfloat16, to every rank."""
        n_ranks = self.placement.shard_ranks
        if n_ranks == 1:
            return 0.0
        n_bytes = 2 * self.shape.n_parameters / self.placement.tensor * (1 - 1 / n_ranks)
        latency = self.shape.n_layers * self.profile.numbers.collective_seconds.value
        return n_bytes / self._bandwidth(n_ranks * self.placement.tensor) + latency

    def _train_link_seconds(self) -> float:
        """Weights gathered for both passes, float32 gradients scattered and summed over replicas."""
        placement, n_ranks = self.placement, self.placement.shard_ranks
        trained = self.shape.n_adapter_parameters or self.shape.n_parameters
        n_bytes = 4 * trained / placement.tensor
        sharded = self._bandwidth(n_ranks * placement.tensor)
        seconds = 2 * self._gather_seconds() + n_bytes * (1 - 1 / n_ranks) / sharded
        if placement.replicas > 1:
            everyone = self._bandwidth(placement.learner_gpus)
            seconds += 2 * n_bytes / n_ranks * (1 - 1 / placement.replicas) / everyone
        return seconds

    def _layer_collective_seconds(self, n_tokens: int) -> float:
        """Of tensor and context parallelism in a forward pass; nothing hides them."""
        placement, shape = self.placement, self.shape
        n_bytes = 2.0 * n_tokens / placement.context * shape.hidden_size * shape.n_layers
        tensor = 4 * n_bytes * (1 - 1 / placement.tensor)
        context = 4 * n_bytes * (1 - 1 / placement.context)
        return (tensor + context) / self._bandwidth(placement.tensor * placement.context)

    def _optimizer_seconds(self) -> float:
        trained = self.shape.n_adapter_parameters or self.shape.n_parameters
        mine = trained / (self.placement.shard_ranks * self.placement.tensor)
        numbers = self.profile.numbers
        offloaded = 24 * mine / numbers.host_bandwidth.value if self.offloads else 0.0
        return _OPTIMIZER_BYTES * mine / numbers.memory_bandwidth.value + offloaded

    def _bandwidth(self, n_gpus: int) -> float:
        """Of collectives over so many neighbours, per GPU."""
        numbers = self.profile.numbers
        inside = n_gpus <= self.profile.gpus_per_node
        link = numbers.intranode_bandwidth if inside else numbers.internode_bandwidth
        return link.value * numbers.collective_share.value


def _share_longest(lengths: Sequence[int], n_ranks: int) -> tuple[int, float]:
    """Tokens, and the sum of squared lengths, of the rank that has most, if the longest go first to
    whoever has least."""
    ranks = [(0, 0.0)] * n_ranks
    heapify(ranks)
    for length in sorted(lengths, reverse=True):
        tokens, squares = ranks[0]
        heapreplace(ranks, (tokens + length, squares + float(length) ** 2))
    return max(ranks)
