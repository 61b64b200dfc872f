"""Every key runs in this version, or its other values have a remedy."""

from __future__ import annotations

import pytest

from skyfleet.config.keys import known_keys
from skyfleet.config.loading import load_config
from skyfleet.config.skyrl_compat import UNSUPPORTED_VALUES, VALUES_WITHOUT_EFFECT
from skyfleet.config.validation import find_unsupported_values

# Keys of which every value runs.
RUNS = """
environment.user.user_strategy
environment.user.user_model
environment.user.user_provider
environment.user.base_url
environment.user.api_key
environment.user.temperature
environment.user.max_generate_length
environment.user.max_input_length
environment.user.timeout_seconds
environment.env_class environment.env_classes environment.worlds environment.partial_reward
environment.openenv.base_url environment.openenv.headers environment.openenv.message_timeout_seconds
environment.openenv.capacity_wait_seconds
environment.mcp.url environment.mcp.command environment.mcp.headers environment.mcp.environment
environment.mcp.call_timeout_seconds environment.mcp.reward environment.mcp.grade_url
environment.mcp.seed_uri environment.mcp.current_uri
environment.skyrl_gym.env_id environment.skyrl_gym.env_config environment.skyrl_gym.max_env_workers
environment.skyrl_gym.fleet_task.api_key environment.skyrl_gym.fleet_task.ttl_seconds
environment.skyrl_gym.fleet_task.partial_reward
environment.verifier.timeout_seconds environment.verifier.allow_unconfined
data.env_filter data.quarantine data.allow_quarantined data.allow_unmanifested data.allow_overlap
data.max_train_tasks
trainer.placement.use_ray
data.max_train_tasks data.env_weights
data.train_data data.val_data data.test_data data.retail_val_data data.held_out_envs
trainer.gradient_checkpointing trainer.loss_chunk_size
trainer.update_ref_every_epoch trainer.hf_save_interval trainer.print_example_interval
trainer.dump_data_batch trainer.dump_training_trajectories
trainer.export_path trainer.dump_eval_results trainer.sentinels.mode trainer.sentinels.modes
generator.chat_template.name_or_path generator.tool_call_parser generator.gpu_memory_utilization
trainer.policy.model.path trainer.policy.model.trust_remote_code trainer.policy.model_config_kwargs
trainer.policy.model.lora.rank trainer.policy.model.lora.alpha
trainer.policy.model.lora.target_modules trainer.policy.model.lora.exclude_modules
trainer.rope_scaling.rope_type trainer.rope_scaling.factor
trainer.rope_scaling.original_max_position_embeddings
trainer.policy.optimizer_config.lr trainer.policy.optimizer_config.adam_betas
trainer.policy.optimizer_config.weight_decay trainer.policy.optimizer_config.max_grad_norm
trainer.policy.optimizer_config.num_warmup_steps trainer.policy.optimizer_config.scheduler
trainer.policy.optimizer_config.offload_after_step trainer.policy.track_extra_gradient_metrics
trainer.ref.fsdp_config.cpu_offload trainer.critic.model.path
trainer.critic.optimizer_config.lr trainer.critic.optimizer_config.adam_betas
trainer.critic.optimizer_config.weight_decay trainer.critic.optimizer_config.max_grad_norm
trainer.critic.optimizer_config.num_warmup_steps trainer.critic.optimizer_config.scheduler
trainer.critic.optimizer_config.offload_after_step trainer.critic_mini_batch_size
trainer.algorithm.temperature
trainer.algorithm.advantage_estimator trainer.algorithm.lambd trainer.algorithm.value_clip
trainer.algorithm.grpo_norm_by_std trainer.algorithm.zero_variance_filter
trainer.algorithm.zero_variance_filter_tol trainer.algorithm.max_seq_len
trainer.algorithm.eps_clip_low trainer.algorithm.eps_clip_high
trainer.algorithm.use_kl_loss trainer.algorithm.kl_loss_coef trainer.algorithm.use_kl_in_reward
trainer.algorithm.kl_estimator_type trainer.algorithm.kl_ctrl.type
trainer.algorithm.kl_ctrl.kl_target trainer.algorithm.kl_ctrl.horizon
trainer.algorithm.use_entropy_loss trainer.algorithm.entropy_loss_coef
trainer.algorithm.policy_loss_type trainer.algorithm.loss_reduction trainer.algorithm.gamma
trainer.algorithm.policy_loss_kwargs trainer.algorithm.advantage_estimator_kwargs
trainer.algorithm.advantage_batch_normalize trainer.algorithm.clip_ratio_c
trainer.algorithm.sapo.tau_pos trainer.algorithm.sapo.tau_neg
trainer.algorithm.clip_cov.clip_ratio trainer.algorithm.clip_cov.clip_cov_lb
trainer.algorithm.clip_cov.clip_cov_ub
trainer.algorithm.kl_cov.kl_cov_frac trainer.algorithm.kl_cov.ppo_kl_coef
trainer.algorithm.cispo.cispo_eps_clip_low trainer.algorithm.cispo.cispo_eps_clip_high
trainer.algorithm.cispo.cispo_anchor
trainer.algorithm.dppo.dppo_type trainer.algorithm.dppo.delta_low trainer.algorithm.dppo.delta_high
trainer.algorithm.off_policy_correction.tis_ratio_type
trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high
trainer.algorithm.off_policy_correction.sequence_tis_ratio_clip_high
trainer.algorithm.off_policy_correction.sequence_mask_metric
trainer.algorithm.off_policy_correction.geo_mask_high
trainer.algorithm.off_policy_correction.geo_mask_low
trainer.algorithm.off_policy_correction.product_mask_high
trainer.algorithm.off_policy_correction.product_mask_low
trainer.algorithm.off_policy_correction.outlier_token_is_threshold_low
trainer.algorithm.off_policy_correction.outlier_token_is_threshold_high
trainer.algorithm.off_policy_correction.token_mask_is_threshold_low
trainer.algorithm.off_policy_correction.token_mask_is_threshold_high
trainer.algorithm.dynamic_sampling.type trainer.algorithm.dynamic_sampling.max_sample_batches
trainer.algorithm.dynamic_sampling.min_replace_ratio
trainer.algorithm.overlong_buffer_len trainer.algorithm.overlong_buffer_penalty_factor
trainer.algorithm.overlong_max_len trainer.ref.model.path generator.step_wise_trajectories
trainer.warm_start.steps trainer.warm_start.batch_size trainer.warm_start.lr
trainer.warm_start.tasks trainer.device trainer.seed trainer.bf16 trainer.epochs trainer.max_training_steps trainer.train_batch_size trainer.policy_mini_batch_size
trainer.update_epochs_per_batch trainer.micro_train_batch_size_per_gpu
trainer.max_tokens_per_microbatch
trainer.max_prompt_length trainer.use_hybrid_env_sampling trainer.min_samples_per_env trainer.curriculum
trainer.eval_before_train trainer.eval_interval trainer.eval_batch_size
trainer.ckpt_interval trainer.max_ckpts_to_keep trainer.resume_mode trainer.resume_path trainer.resume_strict trainer.journal
trainer.fully_async.enabled trainer.fully_async.max_staleness_steps
trainer.fully_async.num_parallel_generation_workers trainer.fully_async.sample_full_batch
trainer.fully_async.clear_kv_cache_on_weight_sync
trainer.ckpt_bucket trainer.trajectory_bucket trainer.ckpt_upload_check trainer.upload_timeout_seconds
trainer.project_name trainer.run_name trainer.run_path trainer.ckpt_path trainer.logger
trainer.wandb.modality trainer.wandb.entity trainer.wandb.project trainer.alerts.slack_channel
trainer.alerts.webhook_url trainer.alerts.dollars_per_hour trainer.prometheus.port
trainer.prometheus.host trainer.prometheus.allowed_hosts trainer.tracing
generator.n_samples_per_prompt generator.eval_n_samples_per_prompt generator.max_turns
generator.max_input_length generator.trajectory_timeout_seconds generator.chat_template_kwargs
generator.apply_overlong_filtering generator.zero_reward_on_non_stop
generator.append_eos_token_after_stop_str_in_multi_turn generator.max_num_batched_tokens
generator.use_conversation_multi_turn generator.batched generator.inject_context_status
generator.context_warning_threshold environment.enable_context_tools environment.max_output_chars
environment.skyrl_gym.fleet_task.enable_context_tools
environment.isolation environment.worker_memory_gb environment.close_timeout_seconds
environment.max_observation_chars
generator.max_num_seqs generator.backend generator.remote_inference_engine_urls
generator.probe_timeout_seconds
generator.use_native_tool_calling generator.tool_call_parsing generator.log_tool_call_repairs
environment.skyrl_gym.tau_bench.use_native_tool_calling
"""

# Read only where another key enables them.
SILENT = """
generator.chat_template.source environment.tau_bench. environment.user.
generator.sampling_params. generator.eval_sampling_params.
"""


def test_the_defaults_run() -> None:
    assert find_unsupported_values(load_config()) == []


def test_a_value_that_does_not_run_loads_and_is_reported() -> None:
    config = load_config(
        "",
        [
            "trainer.strategy=megatron",
            "trainer.policy.model.lora.dropout=0.1",
        ],
    )
    assert find_unsupported_values(config) == [
        "trainer.strategy='megatron' does not run in this version: "
        "Megatron is not supported; use trainer.strategy=single or fsdp",
        "trainer.policy.model.lora.dropout=0.1 does not run in this version: "
        "the engine samples without dropout, so it would sample from another policy; use 0",
    ]


@pytest.mark.parametrize(
    "override",
    [
        "trainer.algorithm.advantage_estimator=rloo",
        "trainer.algorithm.advantage_estimator=my.module:estimate",
        "trainer.algorithm.policy_loss_type=my.module:loss",
        "trainer.algorithm.policy_loss_type=gspo",
        "trainer.algorithm.dynamic_sampling.type=filter",
        "trainer.ref.model.path=other",
        "generator.step_wise_trajectories=true",
        "trainer.algorithm.loss_reduction=sequence_mean",
        "trainer.algorithm.kl_estimator_type=k1",
        "generator.sampling_params.temperature=0.9",
        "trainer.policy.model.path=tiny",
        "trainer.run_name=other",
    ],
)
def test_a_value_that_runs_is_not_reported(override: str) -> None:
    assert find_unsupported_values(load_config("", [override])) == []


def test_every_key_runs_or_has_a_rule() -> None:
    for rules in (UNSUPPORTED_VALUES, VALUES_WITHOUT_EFFECT):
        assert len({rule.key for rule in rules}) == len(rules)
    ruled = {rule.key for rule in (*UNSUPPORTED_VALUES, *VALUES_WITHOUT_EFFECT)}
    assert ruled.isdisjoint(RUNS.split())
    accounted = ruled | set(RUNS.split())
    unaccounted = [
        key
        for key in known_keys()
        if key not in accounted and not key.startswith(tuple(SILENT.split()))
    ]
    assert unaccounted == []
