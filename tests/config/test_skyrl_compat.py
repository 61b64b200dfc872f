"""SkyRL's keys and values load in either spelling, have no effect, or are refused with a remedy."""

from __future__ import annotations

import re

import pytest

from skyfleet.config.keys import known_keys, known_sections
from skyfleet.config.loading import load_config
from skyfleet.config.skyrl_compat import (
    ALIASES,
    UNSUPPORTED_KEYS,
    UNSUPPORTED_VALUES,
    VALUES_WITHOUT_EFFECT,
    find_unsupported_key,
    other_spellings,
)
from skyfleet.errors import ConfigError


def test_skyrls_nested_engine_keys_are_fleets_flat_ones() -> None:
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
    assert nested.ignored_keys == {"trainer.remove_microbatch_padding": False}
    assert nested.trainer.strategy == "fsdp"


def test_every_alias_names_a_key_that_is_known_or_has_a_remedy() -> None:
    rules = {rule.key for rule in (*UNSUPPORTED_VALUES, *VALUES_WITHOUT_EFFECT)}
    known = known_keys().keys() | known_sections() | rules
    assert [
        key for key in ALIASES.values() if not (key in known or find_unsupported_key(key))
    ] == []
    assert other_spellings("trainer.remove_microbatch_padding") == ["trainer.use_sample_packing"]


def test_both_spellings_of_a_key_must_agree() -> None:
    same = ["generator.num_inference_engines=2", "generator.inference_engine.num_engines=2"]
    assert load_config("", same).generator.num_inference_engines == 2
    with pytest.raises(ConfigError) as caught:
        load_config("", [*same[:1], "generator.inference_engine.num_engines=4"])
    assert str(caught.value) == (
        "generator.num_inference_engines=2 and generator.inference_engine.num_engines=4 "
        "are two spellings of one key; keep one"
    )


def test_a_known_key_is_not_in_the_table_of_unsupported_keys() -> None:
    rules = [rule.key for rule in (*UNSUPPORTED_VALUES, *VALUES_WITHOUT_EFFECT)]
    assert [key for key in (*known_keys(), *rules) if find_unsupported_key(key)] == []


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
        "trainer.policy.fsdp_config.mixed_precision.param_dtype",
        "trainer.critic.sequence_parallel_size",
        "trainer.mtp.enabled",
        "trainer.fully_async.simulate_training",
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
def test_an_unsupported_key_is_refused_with_a_remedy(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("", [f"{key}=1"])
    (sentence,) = str(caught.value).splitlines()
    assert sentence.startswith(f"{key}=1 is not supported: ")


def test_a_typo_beside_an_unsupported_key_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"did you mean generator\.inference_engine\.num_engines"):
        load_config("", ["generator.inference_engine.num_engine=1"])


def test_every_unsupported_key_has_a_remedy() -> None:
    verbs = ("drop it", "set ", "put ", "bound ")
    silent = [
        key for key, why in UNSUPPORTED_KEYS.items() if not any(verb in why for verb in verbs)
    ]
    assert silent == []


def test_no_remedy_names_a_value_that_does_not_run() -> None:
    works = {rule.key: rule.supported for rule in UNSUPPORTED_VALUES if not rule.backends}
    named = re.compile(r"((?:data|environment|generator|trainer)(?:\.\w+)+)(?:=(\w+))?")
    settings = [pair for remedy in UNSUPPORTED_KEYS.values() for pair in named.findall(remedy)]
    assert ("trainer.strategy", "single") in settings
    assert [pair for pair in settings if pair[0] in works and pair[1] not in works[pair[0]]] == []


def test_null_as_resume_mode_is_none() -> None:
    assert load_config("", ["trainer.resume_mode=null"]).trainer.resume_mode == "none"
    assert load_config("trainer: {resume_mode: null}").trainer.resume_mode == "none"


def test_skyrls_old_importance_sampling_keys_are_the_token_ratio_and_its_cap() -> None:
    old = load_config(
        "", ["trainer.algorithm.use_tis=true", "trainer.algorithm.tis_imp_ratio_cap=3"]
    )
    correction = old.trainer.algorithm.off_policy_correction
    assert (correction.tis_ratio_type, correction.token_tis_ratio_clip_high) == ("token", 3.0)
    unset = ["trainer.algorithm.use_tis=false", "trainer.algorithm.tis_imp_ratio_cap=-1.0"]
    assert load_config("", unset) == load_config()


def test_batched_generation_has_one_turn_unless_another_number_is_set() -> None:
    assert load_config("", ["generator.batched=true"]).generator.max_turns == 1
    assert load_config().generator.max_turns == 50
    with pytest.raises(ConfigError, match=r"generator\.batched=true has one turn per episode"):
        load_config("", ["generator.batched=true", "generator.max_turns=2"])


@pytest.mark.parametrize(
    "setting",
    [
        "trainer.policy.model.lora.init_method=pissa",
        "generator.sampling_params.logprobs=5",
        "environment.skyrl_gym.fleet_task.enable_hints=true",
    ],
)
def test_a_key_without_a_field_is_refused_where_results_would_differ(setting: str) -> None:
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError) as caught:
        load_config("", [setting])
    assert str(caught.value).startswith(f"{key}=")
    assert " is not supported: " in str(caught.value)


def test_a_key_without_a_field_loads_silently_with_its_old_default() -> None:
    defaults = [
        "trainer.policy.model.lora.init_method=kaiming",
        "generator.eval_sampling_params.logprobs=0",
        "trainer.flash_attn=true",
        "generator.async_engine=true",
        "environment.skyrl_gym.fleet_task.enable_hints=false",
    ]
    assert load_config("", defaults) == load_config()


def test_the_prompt_length_of_an_old_run_was_a_default_without_effect() -> None:
    old_run = [
        "trainer.policy.model.lora.init_method=kaiming",
        "trainer.eval_batch_size=1024",
        "trainer.micro_forward_batch_size_per_gpu=1",
        "trainer.max_prompt_length=512",
        "generator.max_input_length=900",
    ]
    assert load_config("", old_run).trainer.max_prompt_length is None
    assert load_config("", old_run[3:]).trainer.max_prompt_length == 512
