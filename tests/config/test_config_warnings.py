"""A setting that runs but is rarely intended, or has no effect, is a warning."""

from __future__ import annotations

import pytest

from skyfleet.config.loading import load_config
from skyfleet.config.warnings import find_warnings, warn_native_tool_calling

ALGORITHM = "trainer.algorithm"


def warn(*overrides: str) -> list[str]:
    return find_warnings(load_config("", overrides))


@pytest.mark.parametrize("learnt", [0.5, 1.5])
def test_different_temperatures_of_learner_and_engine_are_a_warning(learnt: float) -> None:
    (sentence,) = warn(f"{ALGORITHM}.temperature={learnt}")
    assert sentence.startswith(
        f"{ALGORITHM}.temperature={learnt} and generator.sampling_params.temperature=1.0: "
    )
    assert warn("generator.sampling_params.temperature=0.5") == []


N = "generator.eval_n_samples_per_prompt=4"
EVAL = "generator.eval_sampling_params"


@pytest.mark.parametrize("greedy", ["temperature=0", "top_k=1"])
def test_several_greedy_evaluation_attempts_are_a_warning(greedy: str) -> None:
    (sentence,) = warn(N, f"{EVAL}.temperature=1", f"{EVAL}.{greedy}")
    assert sentence == (
        f"{N} with {EVAL}.{greedy} samples the same attempt 4 times, so pass@4 equals pass@1; "
        f"set generator.eval_n_samples_per_prompt=1, or {EVAL}.temperature=1 without top_k"
    )
    assert warn(N, f"{EVAL}.temperature=0.7") == []


NATIVE = (
    "generator.use_native_tool_calling=true",
    "environment.skyrl_gym.tau_bench.use_native_tool_calling=true",
)


def test_one_of_the_two_native_flags_has_no_effect() -> None:
    assert list(warn_native_tool_calling(load_config("", NATIVE[1:]))) == [
        f"{NATIVE[1]} has no effect while {NATIVE[0].replace('true', 'false')}: "
        "the renderer writes the tools; set both"
    ]
    (sentence,) = warn_native_tool_calling(load_config("", NATIVE[:1]))
    assert sentence.startswith(f"{NATIVE[0]} has no effect while environment.")
    assert list(warn_native_tool_calling(load_config("", NATIVE))) == []
    assert list(warn_native_tool_calling(load_config())) == []


def test_what_one_device_does_not_use_is_one_warning() -> None:
    overrides = (
        "trainer.placement.policy_num_gpus_per_node=4",
        "trainer.policy.fsdp_config.cpu_offload=true",
        "trainer.policy.tensor_parallel_size=2",
    )
    assert warn(*overrides) == [
        f"{', '.join(overrides)} have no effect: training uses one process on one device; "
        "trainer.strategy=fsdp uses several"
    ]
    assert warn("trainer.strategy=fsdp", *overrides) == []


def test_critic_and_reference_have_no_ranks_of_their_own() -> None:
    override = "trainer.placement.critic_num_gpus_per_node=4"
    assert warn("trainer.strategy=fsdp", override) == [
        f"{override} has no effect: the critic and the reference model are divided over the "
        "policy's ranks"
    ]


def test_a_key_that_no_section_has_is_a_warning_with_its_value() -> None:
    assert warn("trainer.log_path=/tmp/skyrl-logs") == [
        "trainer.log_path=/tmp/skyrl-logs has no effect: "
        "trainer.run_path holds everything a run writes"
    ]


@pytest.mark.parametrize(
    "override",
    [
        "generator.enforce_eager=true",
        "generator.num_inference_engines=2",
        "generator.inference_engine_tensor_parallel_size=2",
        "generator.weight_sync_dir=/shared",
        "generator.weight_sync_backend=gloo",
        "generator.delta_weight_sync.sync_dir=/shared",
        "trainer.placement.colocate_all=false",
    ],
)
def test_a_setting_of_vllm_has_no_effect_on_the_embedded_engine(override: str) -> None:
    (sentence,) = warn(override)
    assert sentence.startswith(f"{override} has no effect: ")
    assert warn(override, "generator.backend=vllm") == []


def test_only_servers_have_a_model_name() -> None:
    named = "generator.served_model_name=mine"
    servers = ("generator.backend=openai", "generator.remote_inference_engine_urls=a:1")
    assert len(warn(named)) == len(warn(named, "generator.backend=vllm")) == 1
    assert warn(named, *servers) == []
