"""The scripts of SkyRL and Fleet load with their own overrides; what does not run is listed."""

from __future__ import annotations

import shlex

import pytest
from tests.fakes.recipes import FLEET_8B, FLEET_GRPO, RUN_GSM8K

from skyfleet.config.loading import load_config
from skyfleet.config.root import RunConfig
from skyfleet.config.validation import check_trainable, find_unsupported_values, find_untrainable
from skyfleet.config.warnings import find_warnings
from skyfleet.errors import ConfigError

FLEET_VARIANTS = """
trainer.policy.model_config_kwargs.attn_implementation=sdpa
generator.reasoning_parser=glm45
generator.tool_call_parser=glm47
trainer.flash_attn=false
trainer.loss_chunk_size=4096
trainer.use_sample_packing=false
trainer.dump_training_trajectories=true
+generator.chat_template_kwargs={enable_thinking:true}
generator.engine_init_kwargs.mm_processor_cache_gb=0
generator.context_warning_threshold=0.9
data.env_filter=github
trainer.policy.track_extra_gradient_metrics=true
generator.step_wise_trajectories=true
generator.inject_context_status=true
environment.skyrl_gym.fleet_task.enable_context_tools=true
environment.skyrl_gym.max_env_workers=32
trainer.algorithm.dynamic_sampling.type=filter
"""

TAU_BENCH = """
data:
  train_data: ["${oc.env:HOME}/data/tau_bench/train.parquet"]
  val_data: ["${oc.env:HOME}/data/tau_bench/validation.parquet"]
  retail_val_data: null
  test_data:
    retail: "training/data/tau_bench_test/retail_test.parquet"
    airline: "training/data/tau_bench_test/airline_test.parquet"
generator:
  use_native_tool_calling: true
environment:
  skyrl_gym:
    tau_bench:
      use_native_tool_calling: true
"""

TAU_BENCH_LINE = """
environment.env_class=tau_bench
trainer.algorithm.kl_loss_coef=0.02
trainer.algorithm.eps_clip_low=0.1
trainer.algorithm.eps_clip_high=0.1
trainer.algorithm.value_clip=0.1
trainer.policy.optimizer_config.lr=3e-7
trainer.policy.optimizer_config.weight_decay=0.05
trainer.policy.optimizer_config.max_grad_norm=0.5
trainer.policy.optimizer_config.num_warmup_steps=200
trainer.train_batch_size=64
trainer.policy_mini_batch_size=16
trainer.eval_batch_size=32
trainer.eval_interval=3
trainer.max_prompt_length=16384
generator.n_samples_per_prompt=5
generator.sampling_params.temperature=0.9
generator.sampling_params.top_p=0.95
"""


def load(script: str, *more: str) -> RunConfig:
    return load_config("", [*shlex.split(script), *more])


def list_problems(config: RunConfig) -> list[str]:
    return [*find_unsupported_values(config), *find_untrainable(config)]


def test_skyrls_quick_start_loads_and_can_be_trained() -> None:
    config = load(RUN_GSM8K)
    assert list_problems(config) == []
    assert config.environment.env_class == "gsm8k"
    assert (config.trainer.resume_mode, config.generator.max_turns) == ("none", 1)
    assert (config.trainer.max_prompt_length, config.generator.max_input_length) == (512, 512)
    assert config.generator.num_inference_engines == 2


def test_skyrls_quick_start_warns_about_every_key_without_effect() -> None:
    one_device = (
        "trainer.placement.ref_num_gpus_per_node=4, trainer.placement.critic_num_gpus_per_node=4 "
        "have no effect: the critic and the reference model are divided over the policy's ranks"
    )
    assert find_warnings(load(RUN_GSM8K)) == [
        one_device,
        "trainer.micro_forward_batch_size_per_gpu=64 has no effect: there is no forward pass apart "
        "from training; see trainer.max_tokens_per_microbatch",
        "trainer.log_path=/tmp/skyrl-logs has no effect: "
        "trainer.run_path holds everything a run writes",
    ]


def test_skyrls_quick_start_can_be_trained_with_the_embedded_engine() -> None:
    config = load(RUN_GSM8K, "generator.inference_engine.backend=embedded")
    assert list_problems(config) == []
    ignored = "\n".join(find_warnings(config))
    for key in ("num_inference_engines=2", "inference_engine_tensor_parallel_size=2"):
        assert f"generator.{key} has no effect: " in ignored


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_skyrls_quick_start_loads_with_hydras_prefixes(prefix: str) -> None:
    overrides = [prefix + override for override in shlex.split(RUN_GSM8K)]
    assert load_config("", overrides) == load(RUN_GSM8K)


def test_what_a_script_adds_beyond_this_version_is_listed_at_once() -> None:
    more = (
        "trainer.policy.fsdp_config.wrap_policy={}",
        "trainer.policy.megatron_config.tensor_model_parallel_size=2",
        "generator.inference_engine.enable_pd=true",
        "trainer.fully_async.simulate_training=true",
        "trainer.strategy=megatron",
        "trainer.algorithm.kl_estimator_type=k4",
        "trainer.train_batch_size=1000",
    )
    with pytest.raises(ConfigError) as caught:
        load(RUN_GSM8K, *more)
    lines = str(caught.value).splitlines()
    keys = [override.partition("=")[0] for override in more]
    assert sorted(line.partition("=")[0] for line in lines) == sorted(keys)


def test_fleets_task_file_loads_and_can_be_trained() -> None:
    config = load(FLEET_GRPO)
    assert list_problems(config) == []
    assert config.generator.sampling_params.stop == ["</tool_call>", "<done>"]
    ignored = [sentence.partition("=")[0] for sentence in find_warnings(config)]
    assert ignored == [
        "trainer.placement.ref_num_gpus_per_node",
        "trainer.micro_forward_batch_size_per_gpu",
        "environment.skyrl_gym.fleet_task.tasks_file",
    ]


def test_fleets_8b_recipe_loads() -> None:
    config = load(FLEET_8B)
    assert config.trainer.rope_scaling is not None
    assert config.trainer.rope_scaling.factor == 2.0
    assert config.generator.sampling_params.stop == ["</tool_call>"]
    assert config.generator.eval_sampling_params.temperature == 0.0
    assert config.generator.eval_sampling_params.max_generate_length == 8192
    assert config.trainer.algorithm.temperature == 0.9
    assert config.trainer.ref.model.path == "Qwen/Qwen3-8B"
    assert config.trainer.ckpt_path == "~/ckpts/fleet_tool_use"
    assert config.trainer.logger == ["wandb"]


def test_greedy_evaluation_with_three_attempts_is_a_warning() -> None:
    config = load(FLEET_8B)
    check_trainable(config)
    (greedy,) = [line for line in find_warnings(config) if "eval_n_samples_per_prompt=3" in line]
    assert "pass@3 equals pass@1" in greedy


def test_fleets_variants_load_and_can_be_trained() -> None:
    config = load(FLEET_8B + FLEET_VARIANTS)
    assert list_problems(config) == []
    assert config.generator.chat_template_kwargs == {"enable_thinking": True}
    ignored = "\n".join(find_warnings(config))
    for key in ("generator.reasoning_parser=glm45", "trainer.flash_attn=false"):
        assert f"{key} has no effect: " in ignored


def test_the_tau_bench_recipe_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(TAU_BENCH, TAU_BENCH_LINE.split())
    assert config.data.eval_sets == {
        "val": ["/home/me/data/tau_bench/validation.parquet"],
        "retail": ["training/data/tau_bench_test/retail_test.parquet"],
        "airline": ["training/data/tau_bench_test/airline_test.parquet"],
    }
    assert config.trainer.policy.optimizer_config.lr == 3e-7
    assert config.generator.max_input_length == 16384


def test_the_tau_bench_recipe_can_be_trained() -> None:
    assert list_problems(load_config(TAU_BENCH, TAU_BENCH_LINE.split())) == []


def test_the_tau_bench_recipes_extra_sets_are_named_evaluation_sets() -> None:
    config = load_config(TAU_BENCH, ["data.retail_val_data=['retail.parquet']"])
    assert list(config.data.eval_sets) == ["val", "retail_val", "retail", "airline"]
    assert config.data.main_eval_set == "val"


def test_the_defaults_are_the_ones_the_fleet_guide_prints() -> None:
    config = load_config()
    assert config.trainer.policy.model.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert config.trainer.algorithm.advantage_estimator == "grpo"
    assert config.trainer.policy.optimizer_config.lr == 1e-6
    assert config.trainer.train_batch_size == 4
    assert config.trainer.epochs == 20
    assert config.generator.max_turns == 50
    assert config.trainer.ckpt_interval == 10
