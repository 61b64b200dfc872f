"""AgentEnv: train an agent that was written against OpenAI's API.

The agent runs unchanged and sends its requests to a local server. Its first request opens the episode,
each response is a turn of the policy, and its next request is the observation. Tokens, limits, grades
and losses are those of any other environment.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import isawaitable, iscoroutinefunction
from time import time
from typing import Any
from uuid import uuid4

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.engines.openai_messages import parse_openai_message, to_openai_turn
from skyfleet.envs.env import EnvFactory, Observation, Step
from skyfleet.envs.env_thread import EnvThread
from skyfleet.envs.validation import Reward, parse_grade
from skyfleet.errors import EnvError, MissingExtraError
from skyfleet.serving.access import AccessPolicy
from skyfleet.serving.listening import build_uvicorn_config
from skyfleet.serving.requests import (
    CLIENT_CLOSED_REQUEST,
    ApiError,
    ChatCompletionRequest,
    cancel_on_disconnect,
    parse_request,
)
from skyfleet.serving.token_cache import comparable_fields
from skyfleet.tasks.task import Grade, Task

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as error:
    raise MissingExtraError(error.name or "starlette", "serve") from None

MODEL = "policy"
LOCAL_ACCESS = AccessPolicy()
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


RequestHandler = Callable[[ChatCompletionRequest], Coroutine[Any, Any, Message]]


class AgentGateway:
    """A local OpenAI API server for agents; it runs while any key is registered."""

    def __init__(self, access: AccessPolicy = LOCAL_ACCESS) -> None:
        self._access = access
        self._handlers: dict[str, RequestHandler] = {}
        self._server: LoopbackServer | None = None

    def register(self, handler: RequestHandler) -> tuple[str, str]:
        """The base URL and the key of a client whose requests go to `handler`."""
        if self._server is None or self._server.has_ended:
            routes = [
                Route("/v1/models", _list_models),
                Route("/v1/chat/completions", self._create_chat_completion, methods=["POST"]),
            ]
            self._server = LoopbackServer(Starlette(routes=routes), self._access)
        key = f"episode-{uuid4().hex}"
        self._handlers[key] = handler
        return f"{self._server.url}/v1", key

    async def unregister(self, key: str) -> None:
        """Unknown keys are ignored."""
        self._handlers.pop(key, None)
        if not self._handlers and self._server is not None:
            server, self._server = self._server, None
            await server.stop()

    async def _create_chat_completion(self, request: Request) -> Response:
        try:
            key = request.headers.get("authorization", "").removeprefix("Bearer ")
            handler = self._handlers.get(key)
            if handler is None:
                raise ApiError("no episode has this key, or the episode has ended", status=401)
            body = parse_request(await request.body(), ChatCompletionRequest, template_kwargs={})
            message = await cancel_on_disconnect(request, handler(body))
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except ApiError as error:
            return JSONResponse(error.body, error.status)
        fields = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time()), "model": body.model}
        response = to_openai_turn(message)
        finish_reason = "tool_calls" if message.tool_calls else "stop"
        if body.stream:
            chunks = _stream_chunks(fields, response, finish_reason)
            return StreamingResponse(chunks, media_type="text/event-stream")
        choice = {"index": 0, "message": response, "finish_reason": finish_reason}
        # The run counts the tokens; clients expect the field.
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return JSONResponse(
            {**fields, "object": "chat.completion", "choices": [choice], "usage": usage}
        )


async def _list_models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


async def _stream_chunks(
    fields: dict[str, Any], response: dict[str, Any], finish_reason: str
) -> AsyncIterator[str]:
    """The whole response as one chunk, for clients that stream."""
    delta = dict(response)
    if calls := response.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    choices: tuple[dict[str, Any], ...] = (
        {"delta": delta, "finish_reason": None},
        {"delta": {}, "finish_reason": finish_reason},
    )
    for choice in choices:
        chunk = {**fields, "object": "chat.completion.chunk", "choices": [{"index": 0, **choice}]}
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


class LoopbackServer(uvicorn.Server):
    """An ASGI server on a free port of 127.0.0.1, inside the running event loop.

    By default clients need no token; an app that wants one checks it.
    """

    def __init__(self, app: Any, policy: AccessPolicy = LOCAL_ACCESS) -> None:
        super().__init__(build_uvicorn_config(app, policy, timeout_graceful_shutdown=1))
        self._stopping = asyncio.Event()
        # asyncio sets TCP_NODELAY only on a socket created with IPPROTO_TCP; without it every small
        # response takes 40 ms.
        self._listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listening.bind(("127.0.0.1", 0))
        # Listen before uvicorn has started, so that clients can connect at once.
        self._listening.listen(1024)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._serving = asyncio.create_task(self.serve(sockets=[self._listening]))

    @property
    def has_ended(self) -> bool:
        """True after `stop`, or if the event loop that started it has ended."""
        return self._serving.done()

    async def stop(self) -> None:
        """Disconnects the remaining clients."""
        self._stopping.set()
        await self._serving
        self._listening.close()

    async def main_loop(self) -> None:
        await self._stopping.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves Ctrl-C to the process."""
        yield
