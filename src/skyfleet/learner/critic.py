"""Critic: a separate model that predicts the return of each token, for GAE."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from skyfleet.algorithms.losses.ppo import value_loss
from skyfleet.algorithms.reduction import sequence_mean
from skyfleet.algorithms.sample import Sample
from skyfleet.learner.batching import MicroBatch, mini_batches, pack
from skyfleet.learner.optimizer import Optimizer, OptimizerSettings
from skyfleet.learner.ranks import ONE_RANK, Ranks, join_rows
from skyfleet.learner.shard_files import has_shards, load_shards, load_whole, save_shards
from skyfleet.learner.state_files import load_state
from skyfleet.models.decoder import Decoder
from skyfleet.models.packed import take_rows

_FILE, _SHARDS = "critic.pt", "critic"


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings:
    optimizer: OptimizerSettings
    value_clip: float | None
    compute_advantages: Callable[[Sequence[Sample]], list[Sample]]
    """Samples with values -> the same with advantages and returns."""
    critic_mini_batch_size: int
    """Prompts per optimizer step."""
    update_epochs_per_batch: int = 1
    max_tokens_per_microbatch: int
    gradient_checkpointing: bool = False


class ValueModel:
    """A decoder body with a value head: one number per token."""

    def __init__(self, body: Decoder) -> None:
        self.body = body
        # Zeros: the first values are 0 for every body, without random initialization.
        self.head_E = nn.Parameter(torch.zeros(body.embedding_weight.shape[1], device=body.device))
        body.module.requires_grad_(True)
        if body.head_weight is not body.embedding_weight:
            body.head_weight.requires_grad_(False)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*self.body.module.parameters(), self.head_E]

    def __call__(self, batch: MicroBatch, *, recompute: bool = False) -> Tensor:
        """The value before each action token [N], in float32."""
        return self.body.call(lambda: self._values(batch, recompute))

    def _values(self, batch: MicroBatch, recompute: bool) -> Tensor:
        attention, sequence = batch.attention, self.body.sequence
        hidden_TE = self.body.hidden(
            attention.token_ids_T, attention.positions_T, attention, recompute=recompute
        )
        hidden_NE = take_rows(hidden_TE, batch.before_N)
        if sequence is None:
            return hidden_NE.float() @ self.head_E
        values_N = sequence.keep(hidden_NE).float() @ self.head_E
        return sequence.join(values_N, len(hidden_NE))

    def state_dict(self) -> dict[str, Any]:
        return {"body": self.body.module.state_dict(), "value_head": self.head_E.detach()}

    def list_trained(self) -> list[str]:
        """Names of the trained parameters, in the order of `parameters`."""
        named = self.body.module.named_parameters()
        return [*(name for name, p in named if p.requires_grad), "value_head"]

    @torch.no_grad()
    def keep_parts(self, state: dict[str, Any], ranks: Ranks) -> None:
        """This rank's part of a state dict."""
        for name, parameter in self.body.module.named_parameters():
            ranks.keep_part(parameter, ranks.local(parameter), state["body"][name])
        self.head_E.copy_(state["value_head"])

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.body.module.load_state_dict(state["body"])
        self.head_E.copy_(state["value_head"])


class Critic:
    """Built at the first RL step: before that it holds and saves nothing."""

    def __init__(
        self,
        make_body: Callable[[], Decoder],
        settings: CriticSettings,
        ranks: Ranks = ONE_RANK,
        shard: Callable[[Decoder], None] = lambda _: None,
    ) -> None:
        """`shard` replaces the weights of the body by those of this rank."""
        self._make_body, self._settings = make_body, settings
        self._ranks, self._shard = ranks, shard
        self.is_within_update = False
        """Its weights have changed in a step of the learner that has not ended."""
        self._model: ValueModel | None = None
        self._optimizer: Optimizer

    def value(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with the critic's value of each token."""
        model = self._get_model()
        parts_by_sample: dict[int, list[float]] = {}
        for batch in self._pack(model, samples, [0.0] * len(samples)):
            with torch.no_grad():
                parts = torch.split(model(batch), batch.lengths_B.tolist())
            for index, values in zip(batch.members, parts, strict=True):
                parts_by_sample[index] = values.tolist()
        rows = join_rows(self._ranks.gather(parts_by_sample), len(samples))
        return [
            replace(s, values=s.scatter_to_tokens(row))
            for s, row in zip(samples, rows, strict=True)
        ]

    def learn(self, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, float]]:
        """Compute advantages and returns, then fit the values to the returns."""
        with_returns = self._settings.compute_advantages(samples)
        totals: dict[str, list[float]] = defaultdict(list)
        for _ in range(self._settings.update_epochs_per_batch):
            for mini_batch in mini_batches(with_returns, self._settings.critic_mini_batch_size):
                for name, value in self._update(mini_batch).items():
                    totals[f"critic/{name}"].append(value)
        return with_returns, {name: fmean(values) for name, values in totals.items()}

    def save(self, folder: Path) -> None:
        if self._model is None:
            return
        if self._ranks.is_sharded:
            names = self._model.list_trained()
            save_shards(folder / _SHARDS, names, self._optimizer, self._ranks, {})
            return
        state = self._model.state_dict() | {"optimizer": self._optimizer.state_dict()}
        torch.save(state, folder / _FILE)

    def load(self, folder: Path) -> None:
        """What one process or several have saved."""
        if has_shards(folder / _SHARDS):
            model = self._get_model()
            load_shards(folder / _SHARDS, model.list_trained(), self._optimizer, self._ranks)
        elif (folder / _FILE).exists():
            model = self._get_model()
            state = load_state(folder / _FILE)
            if self._ranks.is_sharded:
                model.keep_parts(state, self._ranks)
                load_whole(folder / _FILE, self._optimizer, self._ranks)
            else:
                model.load_state_dict(state)
                self._optimizer.load_state_dict(state["optimizer"])

    def _get_model(self) -> ValueModel:
        if self._model is None:
            self._model = ValueModel(self._make_body())
            self._shard(self._model.body)
            self._optimizer = Optimizer(
                self._model.parameters, self._settings.optimizer, self._ranks
            )
        return self._model

    def _update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step on the mean over samples of the mean over tokens."""
        model, counts = self._get_model(), [s.n_action_tokens for s in samples]
        sums: dict[str, float] = defaultdict(float)
        for batch in self._pack(model, samples, sequence_mean(counts)):
            members = [samples[i] for i in batch.members]
            values_N = model(batch, recompute=self._settings.gradient_checkpointing)
            if not members:  # another rank has more micro-batches
                values_N.sum().backward()
                continue
            output = value_loss(
                values_N,
                _to_tensor([s.select_action_tokens(s.values) for s in members], values_N),
                _to_tensor([s.select_action_tokens(s.returns) for s in members], values_N),
                value_clip=self._settings.value_clip,
            )
            loss = (output.loss_T * batch.weights_N).sum()
            loss.backward()
            sums["critic_loss"] += float(loss.detach())
            for name, x in {"values_mean": values_N.detach(), **output.metrics_T}.items():
                sums[name] += float(x.sum()) / sum(counts)
        sums = self._ranks.sum(sums)
        sums["critic_lr"] = self._optimizer.lr
        self.is_within_update = True
        self._optimizer.complete_gradients()
        sums["grad_norm"] = self._optimizer.apply()
        return sums

    def _pack(
        self, model: ValueModel, samples: Sequence[Sample], weights: Sequence[float]
    ) -> list[MicroBatch]:
        return pack(
            samples,
            weights,
            max_tokens=self._settings.max_tokens_per_microbatch,
            device=model.body.device,
            ranks=self._ranks,
        )


def _to_tensor(rows: Sequence[Sequence[float]], like_N: Tensor) -> Tensor:
    return like_N.new_tensor([value for row in rows for value in row])
