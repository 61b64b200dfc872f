"""Agents for evaluation and rollouts: a checkpoint, a model behind an endpoint, or a script."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from zlib import crc32

import typer

from skyfleet.cli.arguments import require_torch
from skyfleet.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from skyfleet.config.root import RunConfig
    from skyfleet.engines.engine import ChatModel
    from skyfleet.engines.sampling_params import SamplingParams
    from skyfleet.envs.env import Observation
    from skyfleet.rollouts.conversation import AgentFactory, MessageConversation
    from skyfleet.tasks.task import Task
    from skyfleet.trainer.policy_client import PolicyClient

Agent = Annotated[
    Literal["policy", "oracle", "null", "random"],
    typer.Option(
        help="The policy, the reference solution, an agent that does nothing, or one that calls "
        "random tools."
    ),
]
CheckpointPath = Annotated[
    Path | None,
    typer.Option(
        help="A global_step_N folder or a model folder; by default the run's newest, or with "
        "trainer.resume_mode=none the base model."
    ),
]


def check_agent(config: RunConfig, agent: str, checkpoint: Path | None) -> None:
    """Raise ConfigError for an agent that cannot run; reads only the configuration."""
    if agent == "policy":
        _check_policy(config, checkpoint)
    elif checkpoint is not None:
        raise ConfigError(
            f"--agent {agent} uses no checkpoint; remove --agent or --checkpoint {checkpoint}"
        )


def _check_policy(config: RunConfig, checkpoint: Path | None) -> None:
    from skyfleet.config.validation import find_unsupported_values

    if refused := find_unsupported_values(config):
        raise ConfigError("\n".join(refused))
    if config.generator.is_remote and checkpoint is not None:
        raise ConfigError(
            f"--checkpoint {checkpoint} and generator.backend={config.generator.backend!r}: "
            "a server has its own weights; remove --checkpoint or change the backend"
        )


def check_weights(config: RunConfig, agent: str, checkpoint: Path | None) -> None:
    """Raise ConfigError if the policy's weights are missing; a server has its own."""
    if agent == "policy" and not config.generator.is_remote:
        find_policy_folder(config, checkpoint)


def check_endpoint(config: RunConfig) -> None:
    from skyfleet.config.warnings import warn_greedy_evaluation

    if refused := list(warn_greedy_evaluation(config)):
        raise ConfigError("\n".join(refused))


@asynccontextmanager
async def build_agent(
    config: RunConfig, agent: str, checkpoint: Path | None
) -> AsyncIterator[tuple[AgentFactory, Path | None]]:
    """The agent and its weights folder; None for a scripted agent and for the base model."""
    from skyfleet.rollouts.random_agent import random_policy
    from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy

    check_agent(config, agent, checkpoint)
    scripted: dict[str, AgentFactory] = {"oracle": oracle_policy, "null": null_policy}
    if agent == "random":
        scripted[agent] = random_policy(seed=config.trainer.seed)
    if agent in scripted:
        yield scripted[agent], None
        return
    async with open_run_policy_client(config, checkpoint) as (policy_client, folder):
        yield evaluation_agent(config, policy_client), folder


def evaluation_agent(config: RunConfig, policy_client: PolicyClient) -> AgentFactory:
    from skyfleet.engines.factory import build_sampling_params

    sampling = build_sampling_params(
        config.generator.eval_sampling_params, seed=config.trainer.seed
    )
    return policy_client.agent(sampling)


@asynccontextmanager
async def open_run_policy_client(
    config: RunConfig, checkpoint: Path | None
) -> AsyncIterator[tuple[PolicyClient, Path | None]]:
    """The policy client and its weights folder; None for the base model.

    Its `policy_version` is the step it was trained to, 0 if that is unknown.
    """
    _check_policy(config, checkpoint)
    with require_torch():
        from skyfleet.trainer.policy_client import open_inference_client
    folder = None if config.generator.is_remote else find_policy_folder(config, checkpoint)
    async with open_inference_client(config, folder) as policy_client:
        if not config.generator.is_remote:  # a server reports its own
            policy_client.engine.policy_version = read_step(folder)
        yield policy_client, folder


def describe_weights(config: RunConfig, folder: Path | None) -> str:
    """The weights in words, for the console."""
    if config.generator.is_remote:
        return f"the model at {', '.join(config.generator.remote_inference_engine_urls)}"
    return str(folder or config.trainer.policy.model.path)


def find_model_name(config: RunConfig, policy_client: PolicyClient) -> str:
    """The served name if there is a server, otherwise the model path."""
    from skyfleet.engines.openai_engine import OpenAIEngine

    first = policy_client.engines[0]
    return first.model if isinstance(first, OpenAIEngine) else config.trainer.policy.model.path


@asynccontextmanager
async def open_endpoint_agent(
    config: RunConfig, url: str, model: str
) -> AsyncIterator[AgentFactory]:
    """A model behind an OpenAI-compatible chat endpoint; needs no torch."""
    from skyfleet.engines.openai_chat import OpenAIChat
    from skyfleet.engines.sampling_params import SamplingParams
    from skyfleet.engines.servers import read_api_key

    check_endpoint(config)
    section = config.generator.eval_sampling_params
    sampling = SamplingParams(
        max_generate_length=section.max_generate_length,
        temperature=section.temperature,
        top_p=section.top_p,
        stop=tuple(section.stop),
    )
    async with OpenAIChat(url, model=model, api_key=read_api_key()) as chat:
        await _probe_endpoint(chat, url, replace(sampling, max_generate_length=16, seed=0))
        yield _build_chat_agent(config, chat, sampling)


async def _probe_endpoint(chat: ChatModel, url: str, sampling: SamplingParams) -> None:
    """One short request: an error here would fail every episode."""
    from skyfleet.chat.message import Message
    from skyfleet.engines.engine import ReplyTruncatedError
    from skyfleet.engines.http_client import RequestRejectedError

    try:
        await chat.reply([Message(role="user", content="Say hello.")], (), sampling)
    except ReplyTruncatedError:
        return
    except RequestRejectedError as error:
        raise ConfigError(
            f"--endpoint {url} rejects the request: {error}; change "
            "generator.eval_sampling_params, or correct the url or --model"
        ) from error
    except EngineError as error:
        raise ConfigError(
            f"--endpoint {url} does not answer: {error}; start it, or correct the url, --model or "
            "the key in OPENAI_API_KEY"
        ) from error


def _build_chat_agent(config: RunConfig, chat: ChatModel, sampling: SamplingParams) -> AgentFactory:
    from skyfleet.rollouts.conversation import MessageConversation

    def start(task: Task, observation: Observation, session: str) -> MessageConversation:
        # One seed for all sessions would make all attempts at a task equal.
        seed = crc32(f"{config.trainer.seed}/{session}".encode()) >> 1
        return MessageConversation(observation, model=chat, sampling=replace(sampling, seed=seed))

    return start


def read_step(folder: Path | None) -> int:
    """The step of a checkpoint folder; 0 for a model that was not trained here."""
    number = folder.parent.name.removeprefix("global_step_") if folder else ""
    return int(number) if number.isdecimal() else 0


def find_policy_folder(config: RunConfig, checkpoint: Path | None) -> Path | None:
    """The folder of the checkpoint's policy; None for the configured base model."""
    from skyfleet.checkpoints.checkpoint import read_checkpoint
    from skyfleet.checkpoints.resume import find_checkpoint, verify_part

    if checkpoint is not None and not checkpoint.is_dir():
        raise ConfigError(f"--checkpoint {checkpoint}: no such folder")
    if checkpoint is not None and not (checkpoint / "policy").exists():
        return checkpoint
    if checkpoint is not None:
        return verify_part(read_checkpoint(checkpoint), "policy")
    trainer = config.trainer
    found = find_checkpoint(Path(trainer.ckpt_path), trainer.resume_mode, trainer.resume_path)
    if found is not None:
        return verify_part(found, "policy")
    if trainer.policy.model.path == "tiny" and trainer.resume_mode == "none":
        raise ConfigError(
            "trainer.resume_mode='none' uses the base model, and a tiny policy has none: training "
            "builds it; remove trainer.resume_mode"
        )
    if trainer.policy.model.path == "tiny":
        raise ConfigError(
            f"{trainer.ckpt_path} holds no checkpoint yet, and a tiny policy is built by "
            "training: run `skyfleet train` first, select another run with trainer.run_name or "
            "--checkpoint, or use --agent oracle"
        )
    return None
