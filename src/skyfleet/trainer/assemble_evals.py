"""How a run is evaluated, from configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from skyfleet.config.root import RunConfig
from skyfleet.envs.registry import is_elsewhere
from skyfleet.evaluation.agent_info import AgentInfo
from skyfleet.tasks.task import Task
from skyfleet.trainer.assemble_policy import build_sampling_params
from skyfleet.trainer.evals import Dump, Evals
from skyfleet.trainer.policy_client import PolicyClient
from skyfleet.trajectories.skyrl_dump import dump_folder, write_dump
from skyfleet.trajectories.trajectory import Group


def assemble_evals(
    config: RunConfig,
    policy_client: PolicyClient,
    sets: Mapping[str, Sequence[Task]],
    trained_envs: Collection[str],
) -> Evals:
    sampling = build_sampling_params(
        config.generator.eval_sampling_params, seed=config.trainer.seed
    )
    return Evals(
        sets=sets,
        policy=policy_client.policy(sampling),
        played_by=AgentInfo(
            model=config.trainer.policy.model.path,
            temperature=sampling.temperature,
            max_turns=config.generator.max_turns,
        ),
        n_samples=config.generator.eval_n_samples_per_prompt,
        trained_envs=frozenset(trained_envs),
        costly_envs=frozenset(
            task.env_key
            for tasks in sets.values()
            for task in tasks
            if is_elsewhere(config, task.env_key)
        ),
        dump=_dump_of(config, policy_client) if config.trainer.dump_eval_results else None,
    )


def _dump_of(config: RunConfig, policy_client: PolicyClient) -> Dump:
    """SkyRL's files, for whoever has tools for them."""

    def dump(name: str, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> None:
        write_dump(
            dump_folder(Path(config.trainer.export_path), step, name),
            groups,
            metrics,
            text=policy_client.renderer.text,
            env_class=config.environment.env_class,
            max_turns=config.generator.max_turns,
        )

    return dump
