"""Overrides of scripts that others publish, as their shells pass them."""

from __future__ import annotations

_COMMON = """
trainer.algorithm.advantage_estimator=grpo
trainer.placement.colocate_all=true
trainer.strategy=fsdp2
trainer.placement.policy_num_gpus_per_node=4
trainer.placement.ref_num_gpus_per_node=4
trainer.epochs=20
trainer.eval_before_train=true
trainer.update_epochs_per_batch=1
trainer.ckpt_interval=10
trainer.max_prompt_length=512
trainer.policy.optimizer_config.lr=1.0e-6
trainer.algorithm.use_kl_loss=true
trainer.logger=wandb
"""
"""What all three scripts set."""

# examples/train/gsm8k/run_gsm8k.sh of NovaSky-AI/SkyRL, as the shell passes it with four GPUs, and
# two keys that its earlier versions set (async_engine, distributed_executor_backend).
RUN_GSM8K = f"""{_COMMON}
data.train_data="['/data/gsm8k/train.parquet']"
data.val_data="['/data/gsm8k/validation.parquet']"
trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct
trainer.placement.critic_num_gpus_per_node=4
generator.inference_engine.num_engines=2
generator.inference_engine.tensor_parallel_size=2
trainer.eval_batch_size=1024
trainer.eval_interval=5
trainer.train_batch_size=1024
trainer.policy_mini_batch_size=256
trainer.micro_forward_batch_size_per_gpu=64
trainer.micro_train_batch_size_per_gpu=64
generator.sampling_params.max_generate_length=1024
generator.inference_engine.backend=vllm
generator.inference_engine.run_engines_locally=true
generator.inference_engine.weight_sync_backend=nccl
generator.inference_engine.async_engine=true
generator.inference_engine.distributed_executor_backend=mp
generator.batched=true
environment.env_class=gsm8k
generator.n_samples_per_prompt=5
generator.inference_engine.gpu_memory_utilization=0.8
trainer.project_name=gsm8k
trainer.run_name=gsm8k_test
trainer.resume_mode=null
trainer.log_path=/tmp/skyrl-logs
trainer.ckpt_path=/home/me/ckpts/gsm8k_1.5B_ckpt
"""

_FLEET = f"""{_COMMON}
environment.env_class=fleet_task
generator.num_inference_engines=4
generator.inference_engine_tensor_parallel_size=1
generator.sampling_params.top_p=0.95
generator.max_turns=50
generator.backend=vllm
generator.run_engines_locally=true
generator.weight_sync_backend=nccl
generator.async_engine=true
generator.batched=false
generator.use_conversation_multi_turn=true
generator.n_samples_per_prompt=4
trainer.project_name=fleet-task-grpo
trainer.resume_mode=latest
trainer.dump_data_batch=true
"""
"""What both scripts of Fleet set."""

# skyrl-train/tasks/openenv-fleet-grpo.yaml of fleet-ai/SkyRL, the same way.
FLEET_GRPO = f"""{_FLEET}
data.train_data="['/data/fleet/tool_use/train.parquet']"
data.val_data="['/data/fleet/tool_use/validation.parquet']"
environment.skyrl_gym.fleet_task.tasks_file=/data/fleet/tasks_tool_use.json
trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct
trainer.eval_batch_size=4
trainer.eval_interval=5
trainer.train_batch_size=4
trainer.policy_mini_batch_size=4
trainer.micro_forward_batch_size_per_gpu=4
trainer.micro_train_batch_size_per_gpu=4
generator.sampling_params.max_generate_length=2048
generator.sampling_params.temperature=0.6
generator.sampling_params.stop='["</tool_call>", "<done>"]'
generator.eval_sampling_params.stop='["</tool_call>", "<done>"]'
generator.gpu_memory_utilization=0.8
trainer.run_name=fleet_tool_use_all_pr0
trainer.ckpt_path=/home/me/ckpts/fleet_tool_use
"""

FLEET_8B = f"""{_FLEET}
data.train_data="['/data/train.parquet']"
data.val_data="['/data/validation.parquet']"
environment.skyrl_gym.fleet_task.tasks_file=/data/tasks.json
trainer.policy.model.path=Qwen/Qwen3-8B
++trainer.rope_scaling.rope_type=yarn
++trainer.rope_scaling.factor=2.0
++trainer.rope_scaling.original_max_position_embeddings=32768
trainer.train_batch_size=24
trainer.policy_mini_batch_size=24
trainer.micro_forward_batch_size_per_gpu=2
trainer.micro_train_batch_size_per_gpu=2
trainer.use_hybrid_env_sampling=true
trainer.min_samples_per_env=1
trainer.eval_batch_size=24
trainer.eval_interval=20
generator.max_input_length=48000
generator.sampling_params.max_generate_length=8192
generator.sampling_params.temperature=0.9
generator.sampling_params.stop='["</tool_call>"]'
generator.sampling_params.logprobs=0
generator.eval_sampling_params.stop='["</tool_call>"]'
generator.eval_n_samples_per_prompt=3
generator.gpu_memory_utilization=0.7
trainer.run_name=fleet_tool_use_a7e85045
trainer.ckpt_path='~/ckpts/fleet_tool_use'
trainer.dump_eval_results=true
"""
