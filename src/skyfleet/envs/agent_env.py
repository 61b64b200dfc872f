"""AgentEnv: train an agent that was written against OpenAI's API.

The agent runs unchanged and sends its requests to a local server. Its first request opens the episode,
each response is a turn of the policy, and its next request is the observation. Tokens, limits, grades
and losses are those of any other environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from inspect import isawaitable, iscoroutinefunction

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.engines.openai_messages import parse_openai_message, to_openai_turn
from skyfleet.envs.agent_gateway import MODEL, AgentGateway
from skyfleet.envs.env import EnvFactory, Observation, Step
from skyfleet.envs.env_thread import EnvThread
from skyfleet.envs.validation import Reward, parse_grade
from skyfleet.errors import EnvError
from skyfleet.serving.requests import ApiError, ChatCompletionRequest
from skyfleet.serving.token_cache import comparable_fields
from skyfleet.tasks.task import Grade, Task

GRACE_SECONDS = 5.0
"""For an agent that was truncated to return a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCredentials:
    """How the agent reaches its model; the key belongs to one episode."""

    base_url: str
    key: str
    model: str = MODEL


AgentFn = (
    Callable[[Task, ApiCredentials], Awaitable[Reward]] | Callable[[Task, ApiCredentials], Reward]
)


def agent_env(
    agent: AgentFn,
    *,
    truncated_reward: float | None = None,
    grace_seconds: float = GRACE_SECONDS,
) -> EnvFactory:
    """Make an environment of `agent`; set `environment.env_class` to the result.

    `agent` returns a reward, a Grade, or None if the reward is unknown. A function without `async`
    runs in a thread of its own. `truncated_reward` is the reward of an attempt that the run's limits
    ended and that returned none within `grace_seconds`; None is unknown.
    """
    gateway = AgentGateway()

    async def open_env(task: Task) -> AgentEnv:
        return AgentEnv(
            task, agent, gateway, truncated_reward=truncated_reward, grace_seconds=grace_seconds
        )

    return open_env


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingRequest:
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    response: asyncio.Future[Message]


class AgentEnv:
    def __init__(
        self,
        task: Task,
        agent: AgentFn,
        gateway: AgentGateway,
        *,
        truncated_reward: float | None,
        grace_seconds: float,
    ) -> None:
        self._task, self._agent, self._gateway = task, agent, gateway
        self._truncated_reward, self._grace_seconds = truncated_reward, grace_seconds
        self._requests: asyncio.Queue[_PendingRequest] = asyncio.Queue()
        self._pending: _PendingRequest | None = None
        """The request that waits for its response."""
        self._running: asyncio.Task[Reward] | None = None
        self._key, self._is_over = "", False

    async def reset(self) -> Observation:
        base_url, self._key = self._gateway.register(self._handle_request)
        credentials = ApiCredentials(base_url=base_url, key=self._key)
        self._running = asyncio.create_task(_run_agent(self._agent, self._task, credentials))
        self._pending = pending = await self._next_request(self._running)
        if pending is None:
            raise EnvError("the agent ended before it sent a request to its model")
        return Observation(messages=pending.messages, tools=pending.tools)

    async def step(self, action: Message) -> Step:
        answered = self._pending
        if self._running is None or answered is None:
            raise EnvError(f"task {self._task.key}: no request is pending; call reset first")
        if answered.response.done():
            raise EnvError("the agent's client stopped waiting for its response; raise its timeout")
        answered.response.set_result(action)
        self._pending = pending = await self._next_request(self._running)
        if pending is None:
            return Step(done=True)
        response = parse_openai_message(to_openai_turn(action), splits=False)
        new = _find_new_messages([*answered.messages, response], pending.messages)
        if new is None or pending.tools != answered.tools:
            return Step(opening=Observation(messages=pending.messages, tools=pending.tools))
        return Step(messages=new)

    async def grade(self) -> Grade | None:
        """A truncated agent gets an error response and may still return a reward."""
        if self._running is None:
            return None
        is_truncated = self._pending is not None
        self._reject_pending()
        ended, _ = await asyncio.wait({self._running}, timeout=self._grace_seconds)
        if is_truncated and (not ended or self._running.exception() is not None):
            reward = self._truncated_reward
            return None if reward is None else Grade(reward=reward, success=False)
        return parse_grade(self._running.result(), by=f"the agent of task {self._task.key}")

    async def close(self) -> None:
        self._reject_pending()
        try:
            if self._running is not None:
                self._running.cancel()
                await asyncio.gather(self._running, return_exceptions=True)
        finally:
            await self._gateway.unregister(self._key)

    def _reject_pending(self) -> None:
        """End the episode: every pending and every later request gets an error."""
        self._is_over = True
        waiting = [self._pending] if self._pending else []
        while not self._requests.empty():
            waiting.append(self._requests.get_nowait())
        for pending in waiting:
            if not pending.response.done():
                pending.response.set_exception(_episode_over())

    async def _handle_request(self, request: ChatCompletionRequest) -> Message:
        if self._is_over:
            raise _episode_over()
        if request.n > 1:
            raise ApiError(f"n={request.n}: an episode samples one response; send n=1", param="n")
        if request.logprobs or request.return_token_ids:
            raise ApiError(
                "logprobs and token ids are recorded by the run and not returned; leave them out",
                param="logprobs" if request.logprobs else "return_token_ids",
            )
        if request.stop_strings:
            raise ApiError(
                f"stop={list(request.stop_strings)}: the run decides where a turn stops; set "
                "generator.sampling_params.stop",
                param="stop",
            )
        response: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        await self._requests.put(
            _PendingRequest(
                messages=tuple(message.to_message() for message in request.messages),
                tools=request.tool_specs,
                response=response,
            )
        )
        return await response

    async def _next_request(self, running: asyncio.Task[Reward]) -> _PendingRequest | None:
        """None if the agent has ended. Raises EnvError if it failed."""
        while not running.done() or not self._requests.empty():
            receiving = asyncio.create_task(self._requests.get())
            try:
                await asyncio.wait({receiving, running}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if receiving.done():
                    self._pending = receiving.result()  # so that `_reject_pending` sees it
                else:
                    receiving.cancel()
            # A response that is done belongs to a client that has disconnected.
            if receiving.done() and not receiving.result().response.done():
                return receiving.result()
        if error := running.exception():
            raise EnvError(f"the agent failed: {type(error).__name__}: {error}") from error
        return None


async def _run_agent(agent: AgentFn, task: Task, credentials: ApiCredentials) -> Reward:
    """Raises EnvError for exceptions that would end more than the agent."""
    thread: EnvThread | None = None
    try:
        if iscoroutinefunction(agent):
            result = agent(task, credentials)
        else:
            thread = EnvThread(f"agent {task.key}", asyncio.Semaphore(1))
            result = await thread.call(agent, task, credentials)
        reward: Reward = await result if isawaitable(result) else result
    except asyncio.CancelledError:
        if (own := asyncio.current_task()) is not None and own.cancelling():
            raise
        raise EnvError("the agent cancelled itself") from None
    except SystemExit as error:
        raise EnvError(f"the agent raised {error!r}") from None
    finally:
        if thread is not None:
            thread.end()
    return reward


def _find_new_messages(
    before: Sequence[Message], now: Sequence[Message]
) -> tuple[Message, ...] | None:
    """The messages of `now` after `before`; None if `now` does not begin with `before`."""
    n = len(before)
    if list(map(comparable_fields, now[:n])) != list(map(comparable_fields, before)):
        return None
    return tuple(now[n:])


def _episode_over() -> ApiError:
    return ApiError("the episode has ended by the limits of the run", status=403)
