"""Who plays: the policy of a checkpoint, a model behind an endpoint, or a scripted agent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from zlib import crc32

import typer

from skyfleet.cli.arguments import torch_needed
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
        help="The policy, the reference solution, one that does nothing, or one that calls tools "
        "at random."
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
    """What keeps it from playing and can be told from the configuration alone."""
    if agent == "policy":
        _check_policy(config, checkpoint)
    elif checkpoint is not None:
        raise ConfigError(f"--agent {agent} plays without --checkpoint {checkpoint}; leave one out")


def _check_policy(config: RunConfig, checkpoint: Path | None) -> None:
    from skyfleet.config.rules import unsupported

    if refused := unsupported(config):
        raise ConfigError("\n".join(refused))
    if config.generator.is_remote and checkpoint is not None:
        raise ConfigError(
            f"--checkpoint {checkpoint} and generator.backend={config.generator.backend!r}: "
            "a server speaks with its own weights; leave one out"
        )


def check_weights(config: RunConfig, agent: str, checkpoint: Path | None) -> None:
    """Those of the policy are where they are said to be; a server has its own."""
    if agent == "policy" and not config.generator.is_remote:
        policy_folder_of(config, checkpoint)


def check_endpoint(config: RunConfig) -> None:
    from skyfleet.config.rules import greedy_attempts

    if refused := list(greedy_attempts(config)):
        raise ConfigError("\n".join(refused))


@asynccontextmanager
async def build_agent(
    config: RunConfig, agent: str, checkpoint: Path | None
) -> AsyncIterator[tuple[AgentFactory, Path | None]]:
    """And where its weights lie; None for a scripted agent and for the model as it is."""
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
        yield measured_policy(config, policy_client), folder


def measured_policy(config: RunConfig, policy_client: PolicyClient) -> AgentFactory:
    from skyfleet.engines.factory import build_sampling_params

    sampling = build_sampling_params(
        config.generator.eval_sampling_params, seed=config.trainer.seed
    )
    return policy_client.agent(sampling)


@asynccontextmanager
async def open_run_policy_client(
    config: RunConfig, checkpoint: Path | None
) -> AsyncIterator[tuple[PolicyClient, Path | None]]:
    """How the policy speaks, and where its weights lie; None for the model as it is.

    Its `policy_version` is the step it was trained to, 0 for whatever does not tell.
    """
    _check_policy(config, checkpoint)
    with torch_needed():
        from skyfleet.trainer.policy_client import open_inference_client
    folder = None if config.generator.is_remote else policy_folder_of(config, checkpoint)
    async with open_inference_client(config, folder) as policy_client:
        if not config.generator.is_remote:  # a server tells its own
            policy_client.engine.policy_version = step_of(folder)
        yield policy_client, folder


def weights_named(config: RunConfig, folder: Path | None) -> str:
    """Whose weights speak, in words."""
    if config.generator.is_remote:
        return f"the model at {', '.join(config.generator.remote_inference_engine_urls)}"
    return str(folder or config.trainer.policy.model.path)


def model_named(config: RunConfig, policy_client: PolicyClient) -> str:
    """As its server calls it, where it has one."""
    from skyfleet.engines.openai_engine import OpenAIEngine

    first = policy_client.engines[0]
    return first.model if isinstance(first, OpenAIEngine) else config.trainer.policy.model.path


@asynccontextmanager
async def endpoint_policy(config: RunConfig, url: str, model: str) -> AsyncIterator[AgentFactory]:
    """A model behind an endpoint that speaks OpenAI's chat completions; needs no torch."""
    from skyfleet.engines.openai_chat import OpenAIChat
    from skyfleet.engines.sampling_params import SamplingParams
    from skyfleet.engines.servers import read_key

    check_endpoint(config)
    asked = config.generator.eval_sampling_params
    sampling = SamplingParams(
        max_generate_length=asked.max_generate_length,
        temperature=asked.temperature,
        top_p=asked.top_p,
        stop=tuple(asked.stop),
    )
    async with OpenAIChat(url, model=model, api_key=read_key()) as chat:
        await _check_answers(chat, url, replace(sampling, max_generate_length=16, seed=0))
        yield _chatting(config, chat, sampling)


async def _check_answers(chat: ChatModel, url: str, sampling: SamplingParams) -> None:
    """Before anything is played: what fails here would fail every episode alike."""
    from skyfleet.chat.message import Message
    from skyfleet.engines.engine import CutShortError
    from skyfleet.engines.http_client import RefusedError

    try:
        await chat.reply([Message(role="user", content="Say hello.")], (), sampling)
    except CutShortError:
        return
    except RefusedError as error:
        raise ConfigError(
            f"--endpoint {url} does not take what it is asked: {error}; change "
            "generator.eval_sampling_params, or correct the url or --model"
        ) from error
    except EngineError as error:
        raise ConfigError(
            f"--endpoint {url} gives no answer: {error}; start it, or correct the url, --model or "
            "the key in OPENAI_API_KEY"
        ) from error


def _chatting(config: RunConfig, chat: ChatModel, sampling: SamplingParams) -> AgentFactory:
    from skyfleet.rollouts.conversation import MessageConversation

    def start(task: Task, opening: Observation, session: str) -> MessageConversation:
        # One seed for all would make every attempt at a task the same.
        seed = crc32(f"{config.trainer.seed}/{session}".encode()) >> 1
        return MessageConversation(opening, model=chat, sampling=replace(sampling, seed=seed))

    return start


def step_of(folder: Path | None) -> int:
    """The step whose policy lies there; 0 for whatever was not trained here."""
    number = folder.parent.name.removeprefix("global_step_") if folder else ""
    return int(number) if number.isdecimal() else 0


def policy_folder_of(config: RunConfig, checkpoint: Path | None) -> Path | None:
    """None leaves the model that the configuration names."""
    from skyfleet.checkpoints.checkpoint import read_checkpoint
    from skyfleet.checkpoints.resume import find_checkpoint, verified

    if checkpoint is not None and not checkpoint.is_dir():
        raise ConfigError(f"--checkpoint {checkpoint}: no such folder")
    if checkpoint is not None and not (checkpoint / "policy").exists():
        return checkpoint
    if checkpoint is not None:
        return verified(read_checkpoint(checkpoint), "policy")
    trainer = config.trainer
    found = find_checkpoint(Path(trainer.ckpt_path), trainer.resume_mode, trainer.resume_path)
    if found is not None:
        return verified(found, "policy")
    if trainer.policy.model.path == "tiny" and trainer.resume_mode == "none":
        raise ConfigError(
            "trainer.resume_mode='none' plays the base model, and a tiny policy has none: it is "
            "made by training; leave trainer.resume_mode out"
        )
    if trainer.policy.model.path == "tiny":
        raise ConfigError(
            f"{trainer.ckpt_path} holds no checkpoint yet, and a tiny policy is made by "
            "training: run `skyfleet train` first, name another run by trainer.run_name or its "
            "--checkpoint, or choose --agent oracle"
        )
    return None
