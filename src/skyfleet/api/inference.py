"""Inference with a model: its engine, opened when it is needed, as an agent for episodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any
from zlib import crc32

from skyfleet.api.background import is_responsive
from skyfleet.api.config import ConfigLike, read_config
from skyfleet.api.envs import OBJECT_PREFIX
from skyfleet.api.models import ModelSource
from skyfleet.api.settings import Sampling
from skyfleet.chat.message import Message
from skyfleet.config.loading import config_from_python
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError, EngineError, require_torch

if TYPE_CHECKING:
    from skyfleet.engines.engine import ChatModel
    from skyfleet.engines.sampling_params import SamplingParams
    from skyfleet.envs.env import EnvFactory, Observation
    from skyfleet.envs.python_episode import MessageLike
    from skyfleet.rollouts.conversation import AgentFactory, MessageConversation
    from skyfleet.tasks.task import Task
    from skyfleet.trainer.policy_client import PolicyClient

logger = logging.getLogger(__name__)

AgentBySampling = Callable[["SamplingParams"], "AgentFactory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedEngine:
    loop: asyncio.AbstractEventLoop
    closing: AsyncExitStack
    agent: AgentBySampling
    client: PolicyClient | None
    """None for a model behind an endpoint."""
    served_name: str | None
    """The name of the model on its server, if it has one."""


class LoopLock:
    """A lock between coroutines of several event loops."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._holder: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> None:
        # Polled: a cancelled wait in a thread would still take the lock.
        while not self._lock.acquire(blocking=False):
            holder = self._holder
            if holder not in (None, asyncio.get_running_loop()) and not is_responsive(holder):
                raise ConfigError(
                    "the policy is starting in an event loop that a sync call blocks; use the "
                    "async twin of that call"
                )
            await asyncio.sleep(0.01)
        self._holder = asyncio.get_running_loop()

    async def __aexit__(self, *_: object) -> None:
        self._holder = None
        self._lock.release()


class PolicyEngine:
    """A model and its engine, which starts with the first use and stays until it is closed."""

    def __init__(self, source: ModelSource, config: RunConfig | None = None) -> None:
        self.source = source
        self.config = config or inference_config(source, None)
        self._opened: OpenedEngine | None = None
        self._lock = LoopLock()
        self.served_at: str | None = None
        """The URL of the server that uses the engine."""

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
        agent = (await self.open([task], open_no_env)).agent(self.sampling_params(sampling))
        conversation = agent(task, observation, f"generate/{id(observation)}")
        try:
            return await conversation.generate()
        finally:
            await conversation.close()

    async def aclose(self) -> None:
        """Stop the engine, in the event loop where it runs."""
        async with self._lock:
            await self._close()

    async def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is None:
            return
        if opened.loop is asyncio.get_running_loop():
            await opened.closing.aclose()
        elif opened.loop.is_running():
            closing = asyncio.run_coroutine_threadsafe(opened.closing.aclose(), opened.loop)
            # Polled, because that loop may start to wait for this one; it closes it afterwards.
            while not closing.done() and is_responsive(opened.loop):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if closing.done():
                closing.result()
        else:
            try:  # its loop has ended, with all that ran in it
                await opened.closing.aclose()
            except Exception as error:
                logger.warning("the engine of %s did not stop: %s", self.source.name, error)

    def sampling_params(self, sampling: Sampling | None) -> SamplingParams:
        """The configuration's evaluation sampling, changed by `sampling`."""
        from skyfleet.engines.factory import build_sampling_params

        keys = (sampling or Sampling()).overrides("generator.eval_sampling_params")
        config = config_from_python(self.config, keys)
        seed = config.trainer.seed
        return build_sampling_params(config.generator.eval_sampling_params, seed=seed)

    async def open(self, tasks: Sequence[Task], open_env: EnvFactory) -> OpenedEngine:
        """Start the engine; one that runs in another event loop is stopped first.

        `tasks` and `open_env` are only used to build the tiny model.
        """
        loop = asyncio.get_running_loop()
        async with self._lock:
            if self._opened is not None and self._opened.loop is loop:
                return self._opened
            if self._opened is not None and self.served_at is not None:
                raise ConfigError(
                    f"{self.source.name} is served at {self.served_at}, from another event loop; "
                    "use the URL, or stop the server first"
                )
            await self._close()
            self._opened = await self._open(loop, tasks, open_env)
            return self._opened

    async def _open(
        self, loop: asyncio.AbstractEventLoop, tasks: Sequence[Task], open_env: EnvFactory
    ) -> OpenedEngine:
        async with AsyncExitStack() as stack:
            client: PolicyClient | None = None
            name: str | None
            if self.source.url is not None:
                agent, name = await _connect_chat(self.source.url, self.config, stack)
            else:
                client = await self._start(stack, tasks, open_env)
                agent, name = client.agent, client.served_name
            return OpenedEngine(
                loop=loop, closing=stack.pop_all(), agent=agent, client=client, served_name=name
            )

    async def _start(
        self, stack: AsyncExitStack, tasks: Sequence[Task], open_env: EnvFactory
    ) -> PolicyClient:
        require_torch()
        from skyfleet.trainer.policy_client import open_inference_client

        client = await stack.enter_async_context(
            open_inference_client(
                self.config,
                self.source.folder,
                tasks=tasks,
                open_env=open_env,
                model=self.source.loaded,
            )
        )
        if not self.config.generator.is_remote:  # a server reports its own
            client.engine.policy_version = self.source.step
        return client


def inference_config(
    source: ModelSource, config: ConfigLike, arguments: Mapping[str, Any] | None = None
) -> RunConfig:
    """The configuration to generate with: of `config`, else of the run that trained the model."""
    given = read_config(config)
    if given.base is None and source.run_config is not None:
        given = replace(given, base=source.run_config)
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


async def _connect_chat(
    url: str, config: RunConfig, stack: AsyncExitStack
) -> tuple[AgentBySampling, str]:
    """A model behind an OpenAI-compatible endpoint, and its name there; needs no torch."""
    from skyfleet.engines.factory import build_sampling_params
    from skyfleet.engines.openai_chat import OpenAIChat
    from skyfleet.engines.servers import read_api_key
    from skyfleet.rollouts.conversation import MessageConversation

    api_key = read_api_key()
    seconds = config.generator.probe_timeout_seconds
    name = config.generator.served_model_name or await _find_model_name(url, api_key, seconds)
    chat = await stack.enter_async_context(OpenAIChat(url, model=name, api_key=api_key))
    sampled = build_sampling_params(config.generator.eval_sampling_params, seed=0)
    await _probe_endpoint(chat, url, replace(sampled, max_generate_length=16), seconds)

    def agent(sampling: SamplingParams) -> AgentFactory:
        def start(task: Task, observation: Observation, session: str) -> MessageConversation:
            # One seed for all sessions would make every attempt at a task the same.
            seed = crc32(f"{sampling.seed}/{session}".encode()) >> 1
            return MessageConversation(
                observation, model=chat, sampling=replace(sampling, seed=seed)
            )

        return start

    return agent, name


async def _probe_endpoint(
    chat: ChatModel, url: str, sampling: SamplingParams, timeout_seconds: float
) -> None:
    """One short request: an error here would fail every episode."""
    from skyfleet.engines.engine import ReplyTruncatedError
    from skyfleet.engines.http_client import RequestRejectedError
    from skyfleet.engines.openai_completion import InvalidCompletionError

    try:
        async with asyncio.timeout(timeout_seconds):
            await chat.reply([Message(role="user", content="Say hello.")], (), sampling)
    except ReplyTruncatedError:
        return
    except TimeoutError:
        raise ConfigError(
            f"{url} did not answer within {timeout_seconds:g} s (generator.probe_timeout_seconds); "
            "start it, correct the URL or the model name, or raise the key"
        ) from None
    except InvalidCompletionError as error:
        raise ConfigError(f"{url}: {error}") from error
    except RequestRejectedError as error:
        raise ConfigError(
            f"{url} rejects the request: {error}; change generator.eval_sampling_params, or correct "
            "the URL or the model name"
        ) from error
    except EngineError as error:
        raise ConfigError(
            f"{url} does not answer: {error}; start it, or correct the URL, the model name or the "
            "key in OPENAI_API_KEY"
        ) from error


async def _find_model_name(url: str, api_key: str | None, timeout_seconds: float) -> str:
    from skyfleet.engines.servers import list_models

    try:
        base = url.rstrip("/")
        served = await list_models(
            base, api_key=api_key, timeout_seconds=timeout_seconds, named=base
        )
        return next(iter(served))
    except (ConfigError, StopIteration) as error:
        raise ConfigError(
            f"{url} does not list a model: {error}; start the server, correct the URL, or set "
            'config={"generator.served_model_name": ...}'
        ) from None


async def open_no_env(task: Task) -> Any:
    from skyfleet.envs.python_env import ToolEnv

    return await ToolEnv(reward=lambda: None)(task)
