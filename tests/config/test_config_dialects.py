from __future__ import annotations

import re

import pytest

from skyfleet.config.aliases import SPELLINGS, other_spellings
from skyfleet.config.keys import known_keys
from skyfleet.config.loading import load_config
from skyfleet.config.unsupported_keys import REFUSED, refusal
from skyfleet.config.unsupported_values import GAPS
from skyfleet.errors import ConfigError


def test_upstreams_nested_engine_keys_are_fleets_flat_ones() -> None:
    nested = load_config(
        "generator: {inference_engine: {backend: vllm, tensor_parallel_size: 2, num_engines: 3}}",
        [
            "generator.inference_engine.engine_init_kwargs.mm_processor_cache_gb=0",
            "trainer.placement.policy_num_gpus_per_node=6",
            "trainer.policy_mini_batch_size=3",
            "trainer.train_batch_size=3",
            "trainer.use_sample_packing=false",
            "trainer.strategy=fsdp2",
        ],
    )
    assert nested.generator.backend == "vllm"
    assert nested.generator.inference_engine_tensor_parallel_size == 2
    assert nested.generator.num_inference_engines == 3
    assert nested.generator.engine_init_kwargs == {"mm_processor_cache_gb": 0}
    assert nested.trainer.remove_microbatch_padding is False
    assert nested.trainer.strategy == "fsdp"


def test_every_spelling_leads_to_a_key_we_take_or_refuse_in_words() -> None:
    lost = [ours for ours in SPELLINGS.values() if ours not in known_keys() and not refusal(ours)]
    assert lost == []
    assert other_spellings("trainer.remove_microbatch_padding") == ["trainer.use_sample_packing"]


def test_both_spellings_may_agree_but_not_differ() -> None:
    same = ["generator.num_inference_engines=2", "generator.inference_engine.num_engines=2"]
    assert load_config("", same).generator.num_inference_engines == 2
    with pytest.raises(ConfigError) as caught:
        load_config("", [*same[:1], "generator.inference_engine.num_engines=4"])
    assert str(caught.value) == (
        "generator.num_inference_engines=2 and generator.inference_engine.num_engines=4 "
        "are two spellings of one key; keep one"
    )


def test_a_key_we_take_is_never_in_the_table_of_refusals() -> None:
    assert [key for key in known_keys() if refusal(key)] == []


@pytest.mark.parametrize(
    "key",
    [
        "data.dataloader.num_workers",
        "trainer.critic.model.lora.rank",
        "trainer.critic.fsdp_config.cpu_offload",
        "trainer.ref.fsdp_config.fsdp_size",
        "trainer.policy.megatron_config.ddp_config.overlap_grad_reduce",
        "trainer.ref.megatron_config.mtp_num_layers",
        "trainer.ref.model.fake_int4_qat.enabled",
        "trainer.policy.torch_profiler_config.ranks",
        "trainer.policy.fsdp_config.cpu_offload",
        "trainer.mtp.enabled",
        "trainer.fully_async.max_staleness_steps",
        "trainer.algorithm.use_tis",
        "trainer.algorithm.value_head_prefix",
        "trainer.fused_lm_head_logprob_backend",
        "trainer.num_logger_eval_samples",
        "generator.rope_scaling.factor",
        "generator.inference_engine.external_server_urls",
        "generator.inference_engine.speculative_config",
        "generator.eval_sampling_params.repetition_penalty",
        "environment.skyrl_gym.search.topk",
    ],
)
def test_a_key_of_skyrl_that_we_do_not_take_is_refused_with_the_way_out(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("", [f"{key}=1"])
    (sentence,) = str(caught.value).splitlines()
    assert sentence.startswith(f"{key} is not supported: ")


def test_a_typo_beside_a_refused_key_is_still_a_typo() -> None:
    with pytest.raises(ConfigError, match=r"did you mean generator\.inference_engine\.num_engines"):
        load_config("", ["generator.inference_engine.num_engine=1"])


def test_every_refusal_says_what_to_do() -> None:
    ways_out = ("drop it", "set ", "put ", "bound ")
    assert [key for key, why in REFUSED.items() if not any(way in why for way in ways_out)] == []


def test_no_refusal_sends_to_a_key_that_does_not_run() -> None:
    works = {gap.key: gap.works for gap in GAPS if not gap.backends}
    named = re.compile(r"((?:data|environment|generator|trainer)(?:\.\w+)+)(?:=(\w+))?")
    ways_out = [way for reason in REFUSED.values() for way in named.findall(reason)]
    assert ("trainer.strategy", "single") in ways_out
    assert [way for way in ways_out if way[0] in works and way[1] not in works[way[0]]] == []
