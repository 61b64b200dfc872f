"""The recipes of the seeds load as they are written; what cannot run here is named."""

from __future__ import annotations

import pytest

from skyfleet.config.loading import load_config
from skyfleet.config.rules import unsupported

FLEET_8B = """
data.train_data=['/data/train.parquet']
data.val_data=['/data/validation.parquet']
environment.env_class=fleet_task
environment.skyrl_gym.fleet_task.tasks_file=/data/tasks.json
trainer.algorithm.advantage_estimator=grpo
trainer.algorithm.use_kl_loss=true
trainer.policy.model.path=Qwen/Qwen3-8B
++trainer.rope_scaling.rope_type=yarn
++trainer.rope_scaling.factor=2.0
++trainer.rope_scaling.original_max_position_embeddings=32768
trainer.placement.colocate_all=true
trainer.placement.policy_num_gpus_per_node=4
trainer.placement.ref_num_gpus_per_node=4
trainer.strategy=fsdp2
generator.num_inference_engines=4
generator.inference_engine_tensor_parallel_size=1
trainer.epochs=20
trainer.train_batch_size=24
trainer.policy_mini_batch_size=24
trainer.micro_forward_batch_size_per_gpu=2
trainer.micro_train_batch_size_per_gpu=2
trainer.update_epochs_per_batch=1
trainer.use_hybrid_env_sampling=true
trainer.min_samples_per_env=1
trainer.eval_batch_size=24
trainer.eval_before_train=true
trainer.eval_interval=20
trainer.ckpt_interval=10
trainer.max_prompt_length=512
generator.max_input_length=48000
generator.sampling_params.max_generate_length=8192
generator.sampling_params.temperature=0.9
generator.sampling_params.top_p=0.95
generator.sampling_params.stop=["</tool_call>"]
generator.sampling_params.logprobs=0
generator.eval_sampling_params.stop=["</tool_call>"]
trainer.policy.optimizer_config.lr=1.0e-6
generator.max_turns=50
generator.backend=vllm
generator.run_engines_locally=true
generator.weight_sync_backend=nccl
generator.async_engine=true
generator.batched=false
generator.use_conversation_multi_turn=true
generator.n_samples_per_prompt=4
generator.eval_n_samples_per_prompt=3
generator.gpu_memory_utilization=0.7
trainer.logger=wandb
trainer.project_name=fleet-task-grpo
trainer.run_name=fleet_tool_use_a7e85045
trainer.resume_mode=latest
trainer.ckpt_path=~/ckpts/fleet_tool_use
trainer.dump_data_batch=true
trainer.dump_eval_results=true
"""

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


def unsupported_keys(text: str, line: str) -> set[str]:
    return {line.split("=")[0] for line in unsupported(load_config(text, line.split()))}


def test_fleets_8b_recipe_loads() -> None:
    config = load_config("", FLEET_8B.split())
    assert config.trainer.rope_scaling is not None
    assert config.trainer.rope_scaling.factor == 2.0
    assert config.generator.sampling_params.stop == ["</tool_call>"]
    assert config.generator.eval_sampling_params.temperature == 0.0
    assert config.generator.eval_sampling_params.max_generate_length == 8192
    assert config.trainer.algorithm.temperature == 0.9
    assert config.trainer.ref.model.path == "Qwen/Qwen3-8B"
    assert config.trainer.ckpt_path == "~/ckpts/fleet_tool_use"
    assert config.trainer.logger == ["wandb"]


def test_what_fleets_8b_recipe_asks_beyond_this_version_is_named() -> None:
    assert unsupported_keys("", FLEET_8B) == {
        "environment.skyrl_gym.fleet_task.tasks_file",
        "trainer.placement.policy_num_gpus_per_node",
        "trainer.placement.ref_num_gpus_per_node",
        "trainer.strategy",
        "generator.eval_n_samples_per_prompt",
    }


def test_fleets_variants_load_and_add_to_it() -> None:
    added = unsupported_keys("", FLEET_8B + FLEET_VARIANTS) - unsupported_keys("", FLEET_8B)
    assert "trainer.policy.model_config_kwargs" not in added


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


def test_the_tau_bench_recipe_asks_nothing_beyond_this_version() -> None:
    assert unsupported_keys(TAU_BENCH, TAU_BENCH_LINE) == set()


def test_the_defaults_are_the_ones_the_fleet_guide_prints() -> None:
    config = load_config()
    assert config.trainer.policy.model.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert config.trainer.algorithm.advantage_estimator == "grpo"
    assert config.trainer.policy.optimizer_config.lr == 1e-6
    assert config.trainer.train_batch_size == 4
    assert config.trainer.epochs == 20
    assert config.generator.max_turns == 50
    assert config.trainer.ckpt_interval == 10
