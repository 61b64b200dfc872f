"""SingleLearner: one device holds the policy, its optimiser and, if asked, its reference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyfleet.algorithms.credit_assignment import advantage_metrics
from skyfleet.algorithms.kl import KlEstimator, RewardKl, penalised
from skyfleet.algorithms.losses.loss import LossInputs, PolicyLoss, Selector
from skyfleet.algorithms.losses.policy_gradient import cross_entropy
from skyfleet.algorithms.reduction import Reduction, token_mean
from skyfleet.algorithms.sample import Sample
from skyfleet.errors import ModelError
from skyfleet.learner.batching import MicroBatch, in_sample_order, mini_batches, pack
from skyfleet.learner.critic import Critic
from skyfleet.learner.gradients import gradient_metrics
from skyfleet.learner.learner import StepReport
from skyfleet.learner.logprobs import chosen_logprobs
from skyfleet.learner.optimizer import CPUOffloaded, Optimizer, OptimizerSettings
from skyfleet.learner.step_metrics import GAP, StepMetrics
from skyfleet.models.decoder import Decoder
from skyfleet.models.lora import merge


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    optimizer: OptimizerSettings
    warm_start_optimizer: OptimizerSettings
    policy_loss: PolicyLoss
    select: Selector | None = None
    """For a loss that compares a mini-batch's tokens; costs a forward pass more."""
    reduce: Reduction
    temperature: float
    """The rollouts' own: logprobs are those of the tempered policy."""
    policy_mini_batch_size: int
    """Prompts an optimiser step."""
    update_epochs_per_batch: int = 1
    max_tokens_per_microbatch: int
    loss_chunk_size: int | None = None
    """Tokens of logits held at once; None lets the device choose."""
    gradient_checkpointing: bool = False
    """Run each layer again for its gradient instead of keeping what it computed."""
    comparable_logprobs: bool = True
    """Not so where rollouts drew from a part of the vocabulary (top-p, top-k, min-p) or at another
    temperature: their logprobs are of another distribution, so the policy's own are taken."""
    recompute_old_logprobs: bool = False
    """Ask the policy itself, as the step begins, instead of taking the engine's word."""
    kl: KlEstimator | None = None
    kl_loss_coef: float = 0.0
    entropy_loss_coef: float = 0.0
    reward_kl: RewardKl | None = None
    track_extra_gradient_metrics: bool = False
    offload_reference: bool = False
    """Its weights wait on the CPU between steps."""


class SingleLearner:
    def __init__(
        self,
        decoder: Decoder,
        settings: LearnerSettings,
        *,
        make_reference: Callable[[], Decoder] | None = None,
        critic: Critic | None = None,
        save_policy: Callable[[Path], None],
        load_policy: Callable[[Path], None],
    ) -> None:
        self._decoder, self._settings = decoder, settings
        self._make_reference = make_reference
        """Called when reinforcement begins: the reference is the policy as it stands then."""
        self._reference: Decoder | None = None
        self._parked: CPUOffloaded | None = None
        """The reference, where it waits on the CPU between steps."""
        self._critic = critic
        self._save_policy, self._load_policy = save_policy, load_policy
        self._reward_kl_coef = settings.reward_kl.coef if settings.reward_kl else 0.0
        self.policy_version = 0
        self._phase = ""
        self._optimizer: Optimizer
        self._begin("warm_start")

    async def step(self, samples: Sequence[Sample]) -> StepReport:
        settings = self._begin("policy")
        with self._parked.called() if self._parked else nullcontext():
            return self._reinforce(samples, settings)

    def _reinforce(self, samples: Sequence[Sample], settings: LearnerSettings) -> StepReport:
        if settings.recompute_old_logprobs or not settings.comparable_logprobs:
            own = self._chosen_logprobs(self._decoder, samples)
            samples = [
                replace(s, old_logprobs=s.spread(row)) for s, row in zip(samples, own, strict=True)
            ]
        if self._critic is not None:
            samples = self._critic.value(samples)
        samples, metrics = self._penalised(samples)
        if self._critic is not None:
            samples, learned = self._critic.learn(samples)
            metrics |= learned | advantage_metrics(samples)
        updates = StepMetrics()
        for _ in range(settings.update_epochs_per_batch):
            for mini_batch in mini_batches(samples, settings.policy_mini_batch_size):
                report, spreads = self._update(
                    mini_batch, settings.policy_loss, settings.reduce, settings.select
                )
                updates.add(report, spreads)
        self.policy_version += 1
        metrics |= updates.told()
        credits = self._critic is not None or settings.reward_kl is not None
        return StepReport(
            policy_version=self.policy_version,
            metrics=metrics,
            credited=samples if credits else (),
        )

    async def imitate(self, samples: Sequence[Sample]) -> StepReport:
        self._begin("warm_start")
        report, _ = self._update(samples, cross_entropy, token_mean)
        self.policy_version += 1
        return StepReport(
            policy_version=self.policy_version,
            metrics={"loss": report["final_loss"], "grad_norm": report["grad_norm"]},
        )

    def renew_reference(self) -> None:
        """The next step makes it anew."""
        self._reference = self._parked = None

    def save(self, folder: Path) -> None:
        """`folder` becomes a Hugging Face model folder with the optimiser beside it."""
        self._save_policy(folder)
        state = {
            "phase": self._phase,
            "optimizer": self._optimizer.state_dict(),
            "policy_version": self.policy_version,
            "reward_kl_coef": self._reward_kl_coef,
        }
        torch.save(state, folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        self._load_policy(folder)
        # Not to the device: it would hold everything twice.
        state: dict[str, Any] = torch.load(
            folder / "optimizer.pt", weights_only=True, map_location="cpu"
        )
        self._begin(state["phase"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.policy_version = state["policy_version"]
        # Checkpoints from before there was such a coefficient have none.
        self._reward_kl_coef = state.get("reward_kl_coef", self._reward_kl_coef)

    def _begin(self, phase: str) -> LearnerSettings:
        """Each phase has an optimiser of its own: moments of one mean nothing to the other."""
        if phase != self._phase:
            settings = (
                self._settings.warm_start_optimizer
                if phase == "warm_start"
                else self._settings.optimizer
            )
            self._optimizer = Optimizer(self._decoder.module.parameters(), settings)
            self._phase = phase
        if phase == "policy" and self._reference is None and self._make_reference is not None:
            self._reference = self._make_reference()
            if self._settings.offload_reference:
                self._parked = CPUOffloaded(self._reference.module, beside=self._decoder.module)
        return self._settings

    def _penalised(self, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, float]]:
        """With `use_kl_in_reward`: penalties, and credit for what they leave; a critic gives its own."""
        rules, coef = self._settings.reward_kl, self._reward_kl_coef
        if rules is None or self._reference is None:
            return list(samples), {}
        reference = self._chosen_logprobs(self._reference, samples)
        result = penalised(samples, reference, rules.estimate, coef=coef)
        self._reward_kl_coef = rules.control(coef, result.kl, len(samples))
        metrics = {
            "loss/avg_kl": result.kl,
            "loss/avg_kl_max": result.kl_max,
            "loss/kl_loss_coef": coef,
        }
        credited = result.samples if self._critic else rules.credit(result.samples)
        return credited, metrics

    def _update(
        self,
        samples: Sequence[Sample],
        policy_loss: PolicyLoss,
        reduce: Reduction,
        select: Selector | None = None,
    ) -> tuple[dict[str, float], list[dict[str, Tensor]]]:
        """One optimiser step. Sums run over the whole mini-batch, however it is cut."""
        counts = [s.n_action_tokens for s in samples]
        batches = self._pack(samples, reduce(counts, [s.task_key for s in samples]))
        selected = self._selected(batches, select) if select else [None] * len(batches)
        sums: dict[str, float] = defaultdict(float)
        spreads: list[dict[str, Tensor]] = []
        for batch, selected_N in zip(batches, selected, strict=True):
            shares, spread = self._accumulate(
                batch, policy_loss, selected_N, sum(counts), len(samples)
            )
            for name, value in shares.items():
                sums[name] += value
            spreads.append(spread)
        if self._settings.track_extra_gradient_metrics:
            sums |= gradient_metrics(self._decoder.module.named_parameters())
        sums["policy_lr"] = self._optimizer.lr
        sums["grad_norm"] = self._optimizer.apply()
        merge(self._decoder.module)
        return dict(sums), spreads

    def _selected(self, batches: Sequence[MicroBatch], select: Selector) -> list[Tensor | None]:
        """Judge all tokens of the mini-batch together, in the samples' own order."""
        parts: list[LossInputs] = []
        for batch in batches:
            with torch.no_grad():
                parts.append(batch.inputs(self._logprobs(self._decoder, batch)[0]))
        whole, order_N = in_sample_order(parts, [b.members for b in batches])
        selected_N = torch.empty_like(order_N, dtype=torch.bool)
        selected_N[order_N] = select(whole)
        return list(torch.split(selected_N, [len(b.chosen_N) for b in batches]))

    def _accumulate(
        self,
        batch: MicroBatch,
        policy_loss: PolicyLoss,
        selected_N: Tensor | None,
        n_tokens: int,
        n_sequences: int,
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Add one micro-batch's gradients; its share of every metric comes back, and its spreads."""
        logprobs_N, entropy_N = self._logprobs(self._decoder, batch)
        output = policy_loss(batch.inputs(logprobs_N, selected_N))
        policy_part = loss = (output.loss_T * batch.weights_N).sum()
        shares = {"policy_loss": policy_part}
        if self._settings.kl is not None and self._reference is not None:
            with torch.no_grad():
                ref_logprobs_N, _ = self._logprobs(self._reference, batch)
            kl = (self._settings.kl(logprobs_N, ref_logprobs_N) * batch.kl_weights_N).sum()
            loss = loss + self._settings.kl_loss_coef * kl
            shares["policy_kl"] = kl
        entropy = entropy_N.sum() / n_tokens
        if self._settings.entropy_loss_coef != 0:
            loss = loss - self._settings.entropy_loss_coef * entropy
        if not loss.requires_grad:
            raise ModelError(
                "the policy loss has no gradient: make it of logprobs_T, which nothing may detach"
            )
        loss.backward()
        shares |= {"final_loss": loss, "policy_entropy": entropy}
        spreads = {name: x.detach() for name, x in output.spreads_T.items()}
        if self._settings.comparable_logprobs:
            spreads[GAP] = (logprobs_N.detach() - batch.behaviour_logprobs_N).abs()
        shares |= {name: x.sum() / n_tokens for name, x in output.metrics_T.items()}
        shares |= {name: x.sum() / n_sequences for name, x in output.metrics_B.items()}
        return {name: float(share.detach()) for name, share in shares.items()}, spreads

    def _chosen_logprobs(self, decoder: Decoder, samples: Sequence[Sample]) -> list[list[float]]:
        """What `decoder` gives to the tokens that were sampled."""
        rows: list[list[float]] = [[] for _ in samples]
        for batch in self._pack(samples, [0.0] * len(samples)):
            with torch.no_grad():
                logprobs_N, _ = self._logprobs(decoder, batch)
            parts = torch.split(logprobs_N, batch.lengths_B.tolist())
            for index, part_N in zip(batch.members, parts, strict=True):
                rows[index] = part_N.tolist()
        return rows

    def _pack(self, samples: Sequence[Sample], weights: Sequence[float]) -> list[MicroBatch]:
        return pack(
            samples,
            weights,
            max_tokens=self._settings.max_tokens_per_microbatch,
            device=self._decoder.device,
        )

    def _logprobs(self, decoder: Decoder, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return chosen_logprobs(
            decoder,
            batch,
            temperature=self._settings.temperature,
            chunk_size=self._settings.loss_chunk_size,
            entropy_gradient=self._settings.entropy_loss_coef != 0,
            recompute=self._settings.gradient_checkpointing and torch.is_grad_enabled(),
        )
