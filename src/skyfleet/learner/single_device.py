"""SingleDeviceLearner: policy, optimizer and, if configured, KL reference and critic on one device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from skyfleet.algorithms.credit_assignment import advantage_metrics
from skyfleet.algorithms.kl import KlEstimator, RewardKl, apply_kl_penalty
from skyfleet.algorithms.losses.loss import LossFunction, LossInputs, Selector
from skyfleet.algorithms.losses.policy_gradient import cross_entropy
from skyfleet.algorithms.reduction import Reduction, token_mean
from skyfleet.algorithms.sample import Sample, name_samples
from skyfleet.errors import ModelError
from skyfleet.learner.batching import (
    MicroBatch,
    action_logprobs,
    mini_batches,
    pack,
    sort_by_sample,
)
from skyfleet.learner.critic import Critic
from skyfleet.learner.gradients import gradient_metrics
from skyfleet.learner.learner import LOGPROB_GAP, StepMetrics, StepReport
from skyfleet.learner.optimizer import CPUOffloaded, Optimizer, OptimizerSettings
from skyfleet.learner.ranks import ONE_RANK, Ranks, join_rows
from skyfleet.learner.shard_files import (
    has_shards,
    load_shards,
    load_whole,
    read_shards_state,
    save_shards,
)
from skyfleet.learner.state_files import load_state
from skyfleet.models.decoder import Decoder
from skyfleet.models.lora import merge
from skyfleet.models.out_of_memory import explain_out_of_memory

SHARDS = "shards"
"""The folder of a sharded learner's state, beside the weights."""
_MEMORY_REMEDY = (
    "set trainer.gradient_checkpointing=true, or lower trainer.max_tokens_per_microbatch, "
    "loss_chunk_size or generator.max_input_length"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    optimizer: OptimizerSettings
    warm_start_optimizer: OptimizerSettings
    policy_loss: LossFunction
    select: Selector | None = None
    """For a loss that compares the tokens of a mini-batch; costs one more forward pass."""
    reduce: Reduction
    temperature: float
    """The temperature of the rollouts: logprobs are those of the tempered policy."""
    policy_mini_batch_size: int
    """Prompts per optimizer step."""
    update_epochs_per_batch: int = 1
    max_tokens_per_microbatch: int
    loss_chunk_size: int | None = None
    """Tokens whose logits are held at once; None uses the device's default."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of storing its activations."""
    comparable_logprobs: bool = True
    """False if rollouts sampled with top-p, top-k or min-p, or at another temperature: the engine's
    logprobs are then of another distribution, and the learner recomputes the old logprobs."""
    recompute_old_logprobs: bool = False
    """Compute old logprobs with the policy at the start of the step instead of using the engine's."""
    kl: KlEstimator | None = None
    """The estimator of the KL loss term (`use_kl_loss`)."""
    kl_loss_coef: float = 0.0
    entropy_loss_coef: float = 0.0
    reward_kl: RewardKl | None = None
    """KL in the reward (`use_kl_in_reward`)."""
    track_extra_gradient_metrics: bool = False
    offload_reference: bool = False
    """Keep the weights of the reference on the CPU between steps."""


class SingleDeviceLearner:
    def __init__(
        self,
        decoder: Decoder,
        settings: LearnerSettings,
        *,
        make_reference: Callable[[], Decoder] | None = None,
        critic: Critic | None = None,
        save_policy: Callable[[Path], None],
        load_policy: Callable[[Path], None],
        memory_plan: str = "",
        ranks: Ranks = ONE_RANK,
        on_update: Callable[[], None] = lambda: None,
    ) -> None:
        """`memory_plan` describes the memory that was planned, for an error message.

        `on_update` is called after each optimizer step of the policy.

        With several `ranks` this is the part of one of them: each calls the same methods with the
        same samples.
        """
        self._ranks, self._on_update = ranks, on_update
        self.decoder, self._settings = decoder, settings
        self._make_reference = make_reference
        """Loads the reference model (ref_model). Called at the first RL step: the reference is the
        policy at that point."""
        self._reference: Decoder | None = None
        self._offloaded_reference: CPUOffloaded | None = None
        self._critic = critic
        self._save_policy, self._load_policy = save_policy, load_policy
        self._memory_plan = memory_plan
        self._reward_kl_coef = settings.reward_kl.coef if settings.reward_kl else 0.0
        self.policy_version = 0
        self._is_within_update = False
        self._phase = ""
        self._optimizer: Optimizer
        self._enter_phase("warm_start")

    @property
    def is_within_update(self) -> bool:
        critic = self._critic
        return self._is_within_update or (critic is not None and critic.is_within_update)

    async def step(self, samples: Sequence[Sample]) -> StepReport:
        with explain_out_of_memory("the update", _MEMORY_REMEDY, self._memory_plan):
            settings = self._enter_phase("policy")
            reference = self._offloaded_reference
            with reference.on_device() if reference else nullcontext():
                return self._policy_step(samples, settings)

    def _policy_step(self, samples: Sequence[Sample], settings: LearnerSettings) -> StepReport:
        if settings.recompute_old_logprobs or not settings.comparable_logprobs:
            old_logprobs = self._compute_logprobs(self.decoder, samples)
            samples = [
                replace(s, old_logprobs=s.scatter_to_tokens(row))
                for s, row in zip(samples, old_logprobs, strict=True)
            ]
        if self._critic is not None:
            samples = self._critic.value(samples)
        samples, metrics, reward_kl_coef = self._apply_reward_kl(samples)
        if self._critic is not None:
            samples, critic_metrics = self._critic.learn(samples)
            metrics |= critic_metrics | advantage_metrics(samples)
        updates = StepMetrics()
        for _ in range(settings.update_epochs_per_batch):
            for mini_batch in mini_batches(samples, settings.policy_mini_batch_size):
                update, stats = self._update(
                    mini_batch, settings.policy_loss, settings.reduce, settings.select
                )
                updates.add(update, stats)
        self.policy_version += 1
        self._is_within_update, self._reward_kl_coef = False, reward_kl_coef
        if self._critic is not None:
            self._critic.is_within_update = False
        metrics |= updates.compute()
        computed_advantages = self._critic is not None or settings.reward_kl is not None
        return StepReport(
            policy_version=self.policy_version,
            metrics=metrics,
            samples=samples if computed_advantages else (),
        )

    async def sft_step(self, samples: Sequence[Sample]) -> StepReport:
        with explain_out_of_memory("the warm start", _MEMORY_REMEDY, self._memory_plan):
            self._enter_phase("warm_start")
            update, _ = self._update(samples, cross_entropy, token_mean)
        self.policy_version += 1
        self._is_within_update = False
        return StepReport(
            policy_version=self.policy_version,
            metrics={"loss": update["final_loss"], "grad_norm": update["grad_norm"]},
        )

    def renew_reference(self) -> None:
        """The next step loads it anew."""
        self._reference = self._offloaded_reference = None

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        dtype = self.decoder.dtype
        for name, weight in self._ranks.whole_weights(self.decoder.module):
            yield name, weight.to(dtype) if self._ranks.is_sharded else weight

    def save(self, folder: Path) -> None:
        """Write a Hugging Face model folder with the optimizer state beside it."""
        self._save_policy(folder)
        state = {
            "phase": self._phase,
            "policy_version": self.policy_version,
            "reward_kl_coef": self._reward_kl_coef,
        }
        if self._ranks.is_sharded:
            shards = folder / SHARDS
            save_shards(shards, self._list_trained(), self._optimizer, self._ranks, state)
        else:
            optimizer = {"optimizer": self._optimizer.state_dict()}
            torch.save(state | optimizer, folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        """What one process or several have saved."""
        shards = folder / SHARDS
        if has_shards(shards):
            if not self._ranks.is_sharded:  # the ranks have the weights in their shards
                self._load_policy(folder)
            state = read_shards_state(shards)
            self._enter_phase(state["phase"])
            load_shards(shards, self._list_trained(), self._optimizer, self._ranks)
            merge(self.decoder.module)
        else:
            self._load_policy(folder)
            state = load_state(folder / "optimizer.pt")
            self._enter_phase(state["phase"])
            if self._ranks.is_sharded:
                load_whole(folder / "optimizer.pt", self._optimizer, self._ranks)
            else:
                self._optimizer.load_state_dict(state["optimizer"])
        self.policy_version = state["policy_version"]
        # Old checkpoints have no such coefficient.
        self._reward_kl_coef = state.get("reward_kl_coef", self._reward_kl_coef)

    def _list_trained(self) -> list[str]:
        named = self.decoder.module.named_parameters()
        return [name for name, parameter in named if parameter.requires_grad]

    def _enter_phase(self, phase: str) -> LearnerSettings:
        """Each phase has its own optimizer: Adam's moments do not carry over."""
        if phase != self._phase:
            settings = (
                self._settings.warm_start_optimizer
                if phase == "warm_start"
                else self._settings.optimizer
            )
            self._optimizer = Optimizer(self.decoder.module.parameters(), settings, self._ranks)
            self._phase = phase
        if phase == "policy" and self._reference is None and self._make_reference is not None:
            self._reference = self._make_reference()
            if self._settings.offload_reference:
                self._offloaded_reference = CPUOffloaded(
                    self._reference.module, beside=self.decoder.module
                )
        return self._settings

    def _apply_reward_kl(
        self, samples: Sequence[Sample]
    ) -> tuple[list[Sample], dict[str, float], float]:
        """With `use_kl_in_reward`: KL penalties, and the advantages of the penalized rewards.

        With a critic, the critic computes the advantages. Returns also the next coefficient.
        """
        rules, coef = self._settings.reward_kl, self._reward_kl_coef
        if rules is None or self._reference is None:
            return list(samples), {}, coef
        ref_logprobs = self._compute_logprobs(self._reference, samples)
        result = apply_kl_penalty(samples, ref_logprobs, rules.estimate, coef=coef)
        next_coef = rules.control(coef, result.kl, len(samples))
        metrics = {
            "loss/avg_kl": result.kl,
            "loss/avg_kl_max": result.kl_max,
            "loss/kl_loss_coef": coef,
        }
        if self._critic:
            return result.samples, metrics, next_coef
        return rules.compute_advantages(result.samples), metrics, next_coef

    def _update(
        self,
        samples: Sequence[Sample],
        policy_loss: LossFunction,
        reduce: Reduction,
        select: Selector | None = None,
    ) -> tuple[dict[str, float], list[dict[str, Tensor]]]:
        """One optimizer step. Sums run over the whole mini-batch, however it is split."""
        counts = [s.n_action_tokens for s in samples]
        batches = self._pack(samples, reduce(counts, [s.task_key for s in samples]))
        selected = self._select(batches, select) if select else [None] * len(batches)
        sums: dict[str, float] = defaultdict(float)
        stats: list[dict[str, Tensor]] = []
        for batch, selected_N in zip(batches, selected, strict=True):
            with name_samples([samples[index] for index in batch.members]):
                batch_metrics, batch_stats = self._forward_backward(
                    batch, policy_loss, selected_N, sum(counts), len(samples)
                )
            for name, value in batch_metrics.items():
                sums[name] += value
            stats.append(batch_stats)
        self._optimizer.complete_gradients()
        sums = self._ranks.sum(sums)
        stats = [part for parts in self._ranks.gather(stats) for part in parts]
        if self._settings.track_extra_gradient_metrics:
            named = self.decoder.module.named_parameters()
            sums |= gradient_metrics(self._ranks.whole_gradients(named))
        sums["policy_lr"] = self._optimizer.lr
        self._is_within_update = True
        sums["grad_norm"] = self._optimizer.apply()
        merge(self.decoder.module)
        self._on_update()
        return sums, stats

    def _select(self, batches: Sequence[MicroBatch], select: Selector) -> list[Tensor | None]:
        """Run the selector on all tokens of the mini-batch, in the order of the samples."""
        parts: list[LossInputs] = []
        for batch in batches:
            with torch.no_grad():
                parts.append(batch.loss_inputs(self._logprobs(self.decoder, batch)[0]))
        members = [batch.members for batch in batches]
        every = self._ranks.gather((parts, members))
        whole, order_N = sort_by_sample(
            [part for parts, _ in every for part in parts],
            [batch for _, batches in every for batch in batches],
        )
        selected_N = torch.empty_like(order_N, dtype=torch.bool)
        selected_N[order_N] = select(whole)
        sizes = [[len(part.tokens_T) for part in parts] for parts, _ in every]
        own_N = torch.split(selected_N, [sum(of_rank) for of_rank in sizes])[self._ranks.rank]
        return list(torch.split(own_N, [len(b.action_N) for b in batches]))

    def _forward_backward(
        self,
        batch: MicroBatch,
        policy_loss: LossFunction,
        selected_N: Tensor | None,
        n_tokens: int,
        n_sequences: int,
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Add the gradients of one micro-batch. Returns its share of each metric, and its `stats_T`."""
        logprobs_N, entropy_N = self._logprobs(self.decoder, batch)
        ref_logprobs_N: Tensor | None = None
        if self._settings.kl is not None and self._reference is not None:
            with torch.no_grad():
                ref_logprobs_N, _ = self._logprobs(self._reference, batch)
        if not batch.members:  # another rank has more micro-batches
            (logprobs_N.sum() + entropy_N.sum()).backward()
            return {}, {}
        output = policy_loss(batch.loss_inputs(logprobs_N, selected_N))
        policy_loss_share = loss = (output.loss_T * batch.weights_N).sum()
        metrics = {"policy_loss": policy_loss_share}
        if self._settings.kl is not None and ref_logprobs_N is not None:
            kl = (self._settings.kl(logprobs_N, ref_logprobs_N) * batch.kl_weights_N).sum()
            # The KL term (use_kl_loss) enters the loss here.
            loss = loss + self._settings.kl_loss_coef * kl
            metrics["policy_kl"] = kl
        entropy = entropy_N.sum() / n_tokens
        if self._settings.entropy_loss_coef != 0:
            loss = loss - self._settings.entropy_loss_coef * entropy
        if not loss.requires_grad:
            raise ModelError(
                "the policy loss does not require grad; compute it from inputs.logprobs_T without "
                "detaching it"
            )
        loss.backward()
        metrics |= {"final_loss": loss, "policy_entropy": entropy}
        stats = {name: x.detach() for name, x in output.stats_T.items()}
        if self._settings.comparable_logprobs:
            stats[LOGPROB_GAP] = (logprobs_N.detach() - batch.behaviour_logprobs_N).abs()
        metrics |= {name: x.sum() / n_tokens for name, x in output.metrics_T.items()}
        metrics |= {name: x.sum() / n_sequences for name, x in output.metrics_B.items()}
        return {name: float(value.detach()) for name, value in metrics.items()}, stats

    def _compute_logprobs(self, decoder: Decoder, samples: Sequence[Sample]) -> list[list[float]]:
        """The logprobs of the action tokens of each sample under `decoder`."""
        rows: dict[int, list[float]] = {}
        for batch in self._pack(samples, [0.0] * len(samples)):
            with torch.no_grad():
                logprobs_N, _ = self._logprobs(decoder, batch)
            parts = torch.split(logprobs_N, batch.lengths_B.tolist())
            for index, part_N in zip(batch.members, parts, strict=True):
                rows[index] = part_N.tolist()
        return join_rows(self._ranks.gather(rows), len(samples))

    def _pack(self, samples: Sequence[Sample], weights: Sequence[float]) -> list[MicroBatch]:
        return pack(
            samples,
            weights,
            max_tokens=self._settings.max_tokens_per_microbatch,
            device=self.decoder.device,
            ranks=self._ranks,
        )

    def _logprobs(self, decoder: Decoder, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return action_logprobs(
            decoder,
            batch,
            temperature=self._settings.temperature,
            chunk_size=self._settings.loss_chunk_size,
            entropy_gradient=self._settings.entropy_loss_coef != 0,
            recompute=self._settings.gradient_checkpointing and torch.is_grad_enabled(),
        )
