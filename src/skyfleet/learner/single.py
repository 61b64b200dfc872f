"""SingleLearner: one device holds the policy, its optimiser and, if asked, its reference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyfleet.algorithms.kl import KlEstimator
from skyfleet.algorithms.losses.cross_entropy import cross_entropy
from skyfleet.algorithms.losses.loss import LossInputs, PolicyLoss
from skyfleet.algorithms.reduction import Reduction, token_mean
from skyfleet.algorithms.sample import Sample
from skyfleet.learner.learner import StepReport
from skyfleet.learner.logprobs import chosen_logprobs
from skyfleet.learner.optimizer import Optimizer, OptimizerSettings
from skyfleet.learner.packing import MicroBatch, pack
from skyfleet.models.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    optimizer: OptimizerSettings
    warm_start_optimizer: OptimizerSettings
    policy_loss: PolicyLoss
    reduce: Reduction
    temperature: float
    """The rollouts' own: logprobs are those of the tempered policy."""
    policy_mini_batch_size: int
    """Prompts an optimiser step."""
    update_epochs_per_batch: int = 1
    max_tokens_per_microbatch: int
    logprobs_chunk_size: int = 1024
    truncated_sampling: bool = False
    """Rollouts drew from a part of the vocabulary (top-p, top-k, min-p). Their logprobs are of that
    part, the policy's of the whole: the two cannot be compared, so the policy's own are taken."""
    kl: KlEstimator | None = None
    kl_loss_coef: float = 0.0


class SingleLearner:
    def __init__(
        self,
        decoder: Decoder,
        settings: LearnerSettings,
        *,
        make_reference: Callable[[], Decoder] | None = None,
        save_policy: Callable[[Path], None],
        load_policy: Callable[[Path], None],
    ) -> None:
        self._decoder, self._settings = decoder, settings
        self._make_reference = make_reference
        """Called when reinforcement begins: the reference is the policy as it stands then."""
        self._reference: Decoder | None = None
        self._save_policy, self._load_policy = save_policy, load_policy
        self.policy_version = 0
        self._phase = ""
        self._optimizer = self._begin("warm_start")

    async def step(self, samples: Sequence[Sample]) -> StepReport:
        self._begin("policy")
        if self._settings.truncated_sampling:
            samples = self._with_own_logprobs(samples)
        totals: dict[str, list[float]] = defaultdict(list)
        for _ in range(self._settings.update_epochs_per_batch):
            for mini_batch in mini_batches(samples, self._settings.policy_mini_batch_size):
                report = self._update(mini_batch, self._settings.policy_loss, self._settings.reduce)
                for name, value in report.items():
                    totals[f"policy/{name}"].append(value)
        self.policy_version += 1
        metrics = {name: sum(values) / len(values) for name, values in totals.items()}
        return StepReport(policy_version=self.policy_version, metrics=metrics)

    async def imitate(self, samples: Sequence[Sample]) -> StepReport:
        self._begin("warm_start")
        report = self._update(samples, cross_entropy, token_mean)
        self.policy_version += 1
        return StepReport(
            policy_version=self.policy_version,
            metrics={"loss": report["final_loss"], "grad_norm": report["grad_norm"]},
        )

    def save(self, folder: Path) -> None:
        """`folder` becomes a Hugging Face model folder with the optimiser beside it."""
        self._save_policy(folder)
        state = {
            "phase": self._phase,
            "optimizer": self._optimizer.state_dict(),
            "policy_version": self.policy_version,
        }
        torch.save(state, folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        self._load_policy(folder)
        state: dict[str, Any] = torch.load(
            folder / "optimizer.pt", weights_only=True, map_location=self._decoder.device
        )
        self._begin(state["phase"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.policy_version = state["policy_version"]

    def _begin(self, phase: str) -> Optimizer:
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
        return self._optimizer

    def _update(
        self, samples: Sequence[Sample], policy_loss: PolicyLoss, reduce: Reduction
    ) -> dict[str, float]:
        """One optimiser step. Sums run over the whole mini-batch, however it is cut."""
        counts = [s.n_chosen for s in samples]
        n_tokens = sum(counts)
        sums: dict[str, float] = defaultdict(float)
        for batch in self._pack(samples, reduce(counts)):
            for name, value in self._accumulate(batch, policy_loss, n_tokens).items():
                sums[name] += value
        sums["policy_lr"] = self._optimizer.lr
        sums["grad_norm"] = self._optimizer.apply()
        return dict(sums)

    def _accumulate(
        self, batch: MicroBatch, policy_loss: PolicyLoss, n_tokens: int
    ) -> dict[str, float]:
        """Add one micro-batch's gradients; its share of every metric comes back."""
        logprobs_N, entropy_N = self._logprobs(self._decoder, batch)
        output = policy_loss(
            LossInputs(
                logprobs_T=logprobs_N,
                behaviour_logprobs_T=batch.behaviour_logprobs_N,
                advantages_T=batch.advantages_N,
            )
        )
        policy_part = loss = (output.loss_T * batch.weights_N).sum()
        shares = {"policy_loss": policy_part}
        if self._settings.kl is not None and self._reference is not None:
            with torch.no_grad():
                ref_logprobs_N, _ = self._logprobs(self._reference, batch)
            kl = (self._settings.kl(logprobs_N, ref_logprobs_N) * batch.kl_weights_N).sum()
            loss = loss + self._settings.kl_loss_coef * kl
            shares["policy_kl"] = kl
        loss.backward()  # type: ignore[no-untyped-call]
        shares |= {"final_loss": loss, "policy_entropy": entropy_N.sum() / n_tokens}
        if not self._settings.truncated_sampling:
            gap_N = (logprobs_N.detach() - batch.behaviour_logprobs_N).abs()
            shares["rollout_train_logprobs_abs_diff_mean"] = gap_N.sum() / n_tokens
        shares |= {name: x.sum() / n_tokens for name, x in output.metrics_T.items()}
        return {name: float(share.detach()) for name, share in shares.items()}

    def _with_own_logprobs(self, samples: Sequence[Sample]) -> list[Sample]:
        """What the policy as it stands gives to the tokens that were sampled."""
        own = list(samples)
        for batch in self._pack(samples, [0.0] * len(samples)):
            with torch.no_grad():
                logprobs_N, _ = self._logprobs(self._decoder, batch)
            values = iter(logprobs_N.tolist())
            for index in batch.members:
                mask = samples[index].loss_mask
                logprobs = tuple(next(values) if chosen else 0.0 for chosen in mask)
                own[index] = replace(samples[index], logprobs=logprobs)
        return own

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
            chunk_size=self._settings.logprobs_chunk_size,
        )


def mini_batches(samples: Sequence[Sample], prompts: int) -> list[list[Sample]]:
    """Runs of `prompts` tasks, every sample of a task in one; the last run may be shorter."""
    by_task = [list(group) for _, group in groupby(samples, key=lambda s: s.task_key)]
    return [
        [sample for group in by_task[start : start + prompts] for sample in group]
        for start in range(0, len(by_task), prompts)
    ]
