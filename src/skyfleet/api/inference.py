"""Inference with a model: its engine, opened when it is needed, as an agent for episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from zlib import crc32

from skyfleet.api.config import ConfigLike, build_config, read_config
from skyfleet.api.envs import OBJECT_PREFIX
from skyfleet.api.models import ModelSource
from skyfleet.api.settings import Sampling
from skyfleet.chat.message import Message
from skyfleet.config.keys import dump_yaml
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError

if TYPE_CHECKING:
    from skyfleet.engines.sampling_params import SamplingParams
    from skyfleet.envs.env import EnvFactory, Observation
    from skyfleet.envs.python_episode import MessageLike
    from skyfleet.rollouts.conversation import AgentFactory, MessageConversation
    from skyfleet.tasks.task import Task
    from skyfleet.trainer.policy_client import PolicyClient

AgentBySampling = Callable[["SamplingParams"], "AgentFactory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedEngine:
    loop: asyncio.AbstractEventLoop
    closing: AsyncExitStack
    agent: AgentBySampling
    client: PolicyClient | None


class PolicyEngine:
    """A model and its engine, which starts with the first use and stays until it is closed."""

    def __init__(self, source: ModelSource, config: RunConfig | None = None) -> None:
        self.source = source
        self.config = config or inference_config(source, None)
        self._opened: OpenedEngine | None = None

    async def generate_async(
        self,
        messages: MessageLike | Sequence[MessageLike],
        *,
        tools: Sequence[Callable[..., Any]] = (),
        sampling: Sampling | None = None,
    ) -> Message:
        """The model's next message after these, in the caller's event loop."""
        from skyfleet.envs.python_episode import Observation
        from skyfleet.tasks.task import Task

        observation = Observation(messages, tools=tools)
        task = Task(key="generate", env_key="env", prompt=observation.messages[-1].text or "-")
        agent = (await self.connect([task], open_no_env))(self.sampling_params(sampling))
        conversation = agent(task, observation, f"generate/{id(observation)}")
        try:
            return await conversation.generate()
        finally:
            await conversation.close()

    async def aclose(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None and opened.loop is asyncio.get_running_loop():
            await opened.closing.aclose()

    def sampling_params(self, sampling: Sampling | None) -> SamplingParams:
        """The configuration's evaluation sampling, changed by `sampling`."""
        from skyfleet.engines.factory import build_sampling_params

        keys = (sampling or Sampling()).overrides("generator.eval_sampling_params")
        config = build_config(dump_yaml(self.config), keys) if keys else self.config
        seed = config.trainer.seed
        return build_sampling_params(config.generator.eval_sampling_params, seed=seed)

    async def connect(self, tasks: Sequence[Task], open_env: EnvFactory) -> AgentBySampling:
        """The policy as agents; `tasks` and `open_env` are only used to build the tiny model."""
        return (await self.open(tasks, open_env)).agent

    async def open(self, tasks: Sequence[Task], open_env: EnvFactory) -> OpenedEngine:
        """Start the engine, once per event loop."""
        loop = asyncio.get_running_loop()
        if self._opened is None or self._opened.loop is not loop:
            async with AsyncExitStack() as opening:
                client, agent = await self._start(opening, tasks, open_env)
                self._opened = OpenedEngine(
                    loop=loop, closing=opening.pop_all(), agent=agent, client=client
                )
        return self._opened

    async def _start(
        self, opening: AsyncExitStack, tasks: Sequence[Task], open_env: EnvFactory
    ) -> tuple[PolicyClient | None, AgentBySampling]:
        if self.source.url is not None:
            return None, await _connect_chat(self.source.url, self.config, opening)
        from skyfleet.trainer.policy_client import open_inference_client, open_policy_client

        if self.config.generator.backend == "embedded":
            from skyfleet.trainer.load_policy import load_policy_model

            model = await load_policy_model(self.config, tasks, open_env, model=self.source.loaded)
            opened = open_policy_client(self.config, model)
        else:
            opened = open_inference_client(self.config, self.source.folder)
        client = await opening.enter_async_context(opened)
        if not self.config.generator.is_remote:
            client.engine.policy_version = self.source.step
        return client, client.agent


def inference_config(
    source: ModelSource, config: ConfigLike, arguments: Mapping[str, Any] | None = None
) -> RunConfig:
    """The configuration to generate with: of `config`, else of the run that trained the model."""
    given = read_config(config)
    if given.base is None and source.run_config is not None:
        given = replace(given, base=dump_yaml(source.run_config))
    keys = dict(arguments or {})
    trained = source.run_config
    if trained is not None and trained.environment.env_class.startswith(OBJECT_PREFIX):
        # The run's environment was an object of its own process.
        keys.setdefault("environment.env_class", "world")
    if source.path is not None:
        keys["trainer.policy.model.path"] = source.path
    if source.folder is not None:
        # Saved weights have their dimensions in their own config.json.
        keys |= {"trainer.policy.model_config_kwargs": {}, "trainer.policy.model.lora.rank": 0}
    return given.build(keys)


async def _connect_chat(url: str, config: RunConfig, opening: AsyncExitStack) -> AgentBySampling:
    """A model behind an OpenAI-compatible endpoint; needs no torch."""
    from skyfleet.engines.openai_chat import OpenAIChat
    from skyfleet.engines.servers import read_api_key
    from skyfleet.rollouts.conversation import MessageConversation

    api_key = read_api_key()
    name = config.generator.served_model_name or await _find_model_name(url, api_key)
    chat = await opening.enter_async_context(OpenAIChat(url, model=name, api_key=api_key))

    def agent(sampling: SamplingParams) -> AgentFactory:
        def start(task: Task, observation: Observation, session: str) -> MessageConversation:
            # One seed for all sessions would make every attempt at a task the same.
            seed = crc32(f"{sampling.seed}/{session}".encode()) >> 1
            return MessageConversation(
                observation, model=chat, sampling=replace(sampling, seed=seed)
            )

        return start

    return agent


async def _find_model_name(url: str, api_key: str | None) -> str:
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with httpx.AsyncClient(headers=headers, timeout=30) as client:
            answer = await client.get(f"{url.rstrip('/')}/models")
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"{url} does not list a model: {error}; start the server, correct the URL, or set "
            'config={"generator.served_model_name": ...}'
        ) from None


async def open_no_env(task: Task) -> Any:
    from skyfleet.envs.python_env import ToolEnv

    return await ToolEnv(reward=lambda: None)(task)
