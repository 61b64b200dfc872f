"""ShardedModels: a rank's part of the policy, its critic and its KL reference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skyfleet.chat.renderers import make_renderer
from skyfleet.config.root import RunConfig
from skyfleet.learner.critic import Critic
from skyfleet.learner.factory import (
    build_critic_settings,
    build_learner_settings,
    load_auxiliary_model,
    needs_reference,
)
from skyfleet.learner.policy_model import PolicyModel, choose_dtype, rope_overrides
from skyfleet.learner.process_ranks import ProcessRanks
from skyfleet.learner.single_device import LearnerSettings, SingleDeviceLearner
from skyfleet.models.adapter_files import (
    FOLDER,
    list_adapters,
    read_adapters,
    reject_adapter_checkpoint,
    write_adapters,
)
from skyfleet.models.decoder import Decoder
from skyfleet.models.hf_decoder import make_decoder
from skyfleet.models.loading import load_model
from skyfleet.models.lora import adapters, add_adapters, merge
from skyfleet.models.sharding import shard_decoder

_CPU = torch.device("cpu")


class ShardedModels:
    """A model is loaded on the CPU; then each rank keeps its part on the device."""

    def __init__(
        self, config: RunConfig, ranks: ProcessRanks, device: torch.device, *, policy: str
    ) -> None:
        self._config, self._ranks, self._path = config, ranks, policy
        self._dtype = choose_dtype(config.trainer.bf16, device)
        trainer = config.trainer
        is_configured = policy == trainer.policy.model.path
        overrides = trainer.policy.model_config_kwargs if is_configured else {}
        loaded = load_model(
            policy,
            dtype=self._dtype,
            device=_CPU,
            config_kwargs=rope_overrides(config) | overrides,
            trust_remote_code=trainer.policy.model.trust_remote_code,
        )
        self._max_positions = config.max_episode_tokens
        self._policy = PolicyModel(
            loaded=loaded,
            decoder=make_decoder(loaded.module, max_positions=self._max_positions),
            renderer=make_renderer(loaded.tokenizer),
        )
        self.reference_folder: Path | None = None
        """Where the policy is that is the KL reference."""

    def build_learner(
        self,
        *,
        total_steps: int,
        wrap_settings: Callable[[LearnerSettings], LearnerSettings],
        on_update: Callable[[], None],
    ) -> tuple[SingleDeviceLearner, Critic | None]:
        config, decoder = self._config, self._policy.decoder
        lora = config.trainer.policy.model.lora
        module: Any = decoder.module
        self._skeleton = _copy_without_weights(module)
        if lora.rank:
            add_adapters(module, lora, seed=config.trainer.seed)
        self._shard(decoder, cpu_offload=config.trainer.policy.fsdp_config.cpu_offload)
        # After it was sharded, because that decides which kernels run.
        settings = build_learner_settings(config, decoder, total_steps=total_steps)
        critic = self._build_critic(total_steps)
        learner = SingleDeviceLearner(
            decoder,
            wrap_settings(settings),
            make_reference=self._make_reference() if needs_reference(config) else None,
            critic=critic,
            save_policy=self.save_policy,
            load_policy=self._load_policy,
            ranks=self._ranks,
            on_update=on_update,
        )
        return learner, critic

    def save_policy(self, folder: Path) -> None:
        """A Hugging Face folder, which rank 0 gathers tensor by tensor in its CPU memory."""
        module, weights = self._policy.decoder.module, dict[str, Tensor]()
        for name, weight in self._ranks.whole_weights(module):
            if self._ranks.is_first:
                kept = weight.to(self._dtype) if weight.is_floating_point() else weight
                weights[name] = kept.cpu().clone()
        tensors = {
            key: self._ranks.gather_parameter(parameter).cpu()
            for key, parameter in list_adapters(adapters(module)).items()
        }
        if self._ranks.is_first:
            self._skeleton.save_pretrained(folder, state_dict=weights)
            self._policy.loaded.tokenizer.save_pretrained(folder)
            write_adapters(module, tensors, folder / FOLDER)
        self._ranks.wait()

    def _shard(self, decoder: Decoder, *, trains: bool = True, cpu_offload: bool = False) -> None:
        rules = self._config.trainer.policy.fsdp_config
        plan = self._ranks.plan(
            cpu_offload=cpu_offload, reshard_after_forward=rules.reshard_after_forward
        )
        shards = shard_decoder(decoder, plan, trains=trains)
        self._ranks.register(decoder.module, shards.splits)

    def _load_policy(self, folder: Path) -> None:
        """Of a single learner's checkpoint: each rank reads the whole folder and keeps its part."""
        module = self._policy.decoder.module
        if adapters(module):
            saved = read_adapters(module, folder)
            for key, parameter in list_adapters(adapters(module)).items():
                self._keep(parameter, saved[key])
            merge(module)
            return
        reject_adapter_checkpoint(folder)
        whole = self._load(str(folder), key="trainer.resume_path").state_dict()
        for name, parameter in module.named_parameters():
            self._keep(parameter, whole[name])

    @torch.no_grad()
    def _keep(self, parameter: nn.Parameter, whole: Tensor) -> None:
        self._ranks.keep_part(parameter, self._ranks.local(parameter), whole)

    def _make_reference(self) -> Callable[[], Decoder]:
        trainer = self._config.trainer
        path = trainer.ref.model.path
        if path != trainer.policy.model.path:
            # At once, so that its errors appear at once.
            other = self._shard_frozen(self._load(path, key="trainer.ref.model.path"))
            return lambda: other
        differs_from_base = trainer.warm_start.steps or trainer.update_ref_every_epoch
        is_base = trainer.policy.model.lora.rank and not differs_from_base

        def load() -> Decoder:
            assert self.reference_folder is not None
            source = self._path if is_base else str(self.reference_folder)
            return self._shard_frozen(self._load(source, key="trainer.ref.model.path"))

        return load

    def _shard_frozen(self, module: nn.Module) -> Decoder:
        module.requires_grad_(False)
        decoder = make_decoder(module, max_positions=self._max_positions)
        offload = self._config.trainer.ref.fsdp_config.cpu_offload
        self._shard(decoder, trains=False, cpu_offload=offload)
        return decoder

    def _build_critic(self, total_steps: int) -> Critic | None:
        path = self._config.trainer.critic.model.path
        if path is None:
            return None
        if path == self._config.trainer.policy.model.path:
            make_body = self._copy_policy
        else:
            body = make_decoder(
                self._load(path, key="trainer.critic.model.path"),
                max_positions=self._max_positions,
            )
            make_body = lambda: body  # noqa: E731
        settings = build_critic_settings(self._config, total_steps=total_steps)
        return Critic(make_body, settings, self._ranks, self._shard)

    def _copy_policy(self) -> Decoder:
        """The policy's current weights, on the CPU."""
        module = self._load(self._path, key="trainer.critic.model.path")
        held = module.state_dict()
        for name, weight in self._ranks.whole_weights(self._policy.decoder.module):
            held[name].copy_(weight)
        return make_decoder(module, max_positions=self._max_positions)

    def _load(self, path: str, *, key: str) -> nn.Module:
        return load_auxiliary_model(
            self._config, self._policy, path, key=key, dtype=self._dtype, device=_CPU
        )


def _copy_without_weights(module: nn.Module) -> Any:
    """The module on the meta device, which knows how its weights are written."""
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {}
    for tensor in tensors:
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, memo)
