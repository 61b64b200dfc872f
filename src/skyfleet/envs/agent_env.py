"""Programs: an agent that somebody wrote against OpenAI's API, as an environment to train in.

The program runs as it is and asks a model of ours. Its first question opens the episode, each answer is
a turn of the policy, and what it asks next is what the world replies: tokens, limits, grades and losses
are those of any other environment.
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
from skyfleet.engines.openai_messages import read_reply, written_turn
from skyfleet.envs.env import EnvFactory, Observation, Step
from skyfleet.envs.env_thread import EnvThread
from skyfleet.envs.validation import Reward, grade_from
from skyfleet.errors import EnvError, MissingExtraError
from skyfleet.serving.requests import ChatCompletionRequest, ApiError, build_error, parse_request, cancel_on_disconnect
from skyfleet.serving.token_cache import comparable_fields
from skyfleet.tasks.task import Grade, Task

try:
    import uvicorn
except ImportError:
    raise MissingExtraError("uvicorn", "serve") from None


class Loopback(uvicorn.Server):
    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
        )
        self._stopping = asyncio.Event()
        # asyncio sends small answers at once only on a socket that says it is TCP; 40 ms each, else.
        self._listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listening.bind(("127.0.0.1", 0))
        # Before uvicorn has started, so that nobody need wait for that.
        self._listening.listen(1024)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._serving = asyncio.create_task(self.serve(sockets=[self._listening]))

    @property
    def has_ended(self) -> bool:
        """With the event loop that it was made in, say."""
        return self._serving.done()

    async def stop(self) -> None:
        """Cuts whoever is still connected."""
        self._stopping.set()
        await self._serving
        self._listening.close()

    async def main_loop(self) -> None:
        await self._stopping.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ctrl-C stays with the process."""
        yield


try:
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError:
    raise MissingExtraError("starlette", "serve") from None

MODEL = "policy"
GenerateRequest = Callable[[ChatCompletionRequest], Coroutine[Any, Any, Message]]


class AgentGateway:
    """Open while anybody has a key."""

    def __init__(self) -> None:
        self._asks: dict[str, GenerateRequest] = {}
        self._server: Loopback | None = None

    def register(self, ask: GenerateRequest) -> tuple[str, str]:
        """The base URL and the key of a client whose every question goes to `ask`."""
        if self._server is None or self._server.has_ended:
            routes = [
                Route("/v1/models", _models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
            self._server = Loopback(Starlette(routes=routes))
        key = f"episode-{uuid4().hex}"
        self._asks[key] = ask
        return f"{self._server.url}/v1", key

    async def leave(self, key: str) -> None:
        """Unknown keys are fine."""
        self._asks.pop(key, None)
        if not self._asks and self._server is not None:
            server, self._server = self._server, None
            await server.stop()

    async def _chat(self, request: Request) -> Response:
        try:
            ask = self._asks.get(request.headers.get("authorization", "").removeprefix("Bearer "))
            if ask is None:
                raise ApiError("no episode has this key, or it is over", status=401)
            body = parse_request(await request.body(), ChatCompletionRequest, template_kwargs={})
            message = await cancel_on_disconnect(request, ask(body))
        except ClientDisconnect:
            return Response(status_code=499)
        except ApiError as error:
            refusal = build_error(
                str(error), status=error.status, param=error.param, code=error.code
            )
            return JSONResponse(refusal, error.status)
        fields = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time()), "model": body.model}
        written = written_turn(message)
        finish = "tool_calls" if message.tool_calls else "stop"
        if body.stream:
            return StreamingResponse(
                _chunks(fields, written, finish), media_type="text/event-stream"
            )
        choice = {"index": 0, "message": written, "finish_reason": finish}
        # The run counts the tokens; clients that add them up find nothing to add.
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        answer = {**fields, "object": "chat.completion", "choices": [choice], "usage": usage}
        return JSONResponse(answer)


async def _models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


async def _chunks(
    fields: dict[str, Any], written: dict[str, Any], finish: str
) -> AsyncIterator[str]:
    """All of it at once: a program that streams gets its stream."""
    delta = dict(written)
    if calls := written.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    for choice in ({"delta": delta, "finish_reason": None}, {"delta": {}, "finish_reason": finish}):
        chunk = {**fields, "object": "chat.completion.chunk", "choices": [{"index": 0, **choice}]}
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


GRACE_SECONDS = 5.0
"""For a program that was cut short to return a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCredentials:
    """Where the program finds its model; the key is the episode's own."""

    base_url: str
    key: str
    model: str = MODEL


AgentFn = Callable[[Task, ApiCredentials], Awaitable[Reward]] | Callable[[Task, ApiCredentials], Reward]


def agent_env(
    solve: AgentFn,
    *,
    truncated_reward: float | None = None,
    grace_seconds: float = GRACE_SECONDS,
) -> EnvFactory:
    """What `environment.env_class` names: opens an episode in which `solve` plays a task.

    `solve` returns a reward, a Grade, or None where it cannot tell; without `async` it has a thread of
    its own. `truncated_reward` is the reward of an attempt that the run's limits ended and that returned none
    itself soon after; None is unknown.
    """
    gateway = AgentGateway()

    async def open_program(task: Task) -> AgentEnv:
        return AgentEnv(
            task, solve, gateway, truncated_reward=truncated_reward, grace_seconds=grace_seconds
        )

    return open_program


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingRequest:
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    answer: asyncio.Future[Message]


class AgentEnv:
    def __init__(
        self,
        task: Task,
        solve: AgentFn,
        gateway: AgentGateway,
        *,
        truncated_reward: float | None,
        grace_seconds: float,
    ) -> None:
        self._task, self._solve, self._gateway = task, solve, gateway
        self._truncated_reward, self._grace_seconds = truncated_reward, grace_seconds
        self._questions: asyncio.Queue[_PendingRequest] = asyncio.Queue()
        self._pending: _PendingRequest | None = None
        """What waits for an answer."""
        self._program: asyncio.Task[Reward] | None = None
        self._key, self._is_over = "", False

    async def reset(self) -> Observation:
        base_url, self._key = self._gateway.register(self._ask)
        api = ApiCredentials(base_url=base_url, key=self._key)
        self._program = asyncio.create_task(_run(self._solve, self._task, api))
        self._pending = asked = await self._next_question(self._program)
        if asked is None:
            raise EnvError("the program ended before it asked its model anything")
        return Observation(messages=asked.messages, tools=asked.tools)

    async def step(self, action: Message) -> Step:
        before = self._pending
        if self._program is None or before is None:
            raise EnvError(f"task {self._task.key}: the program is not asking; call reset first")
        if before.answer.done():
            raise EnvError("the program waits for its answer no longer; raise its client's timeout")
        before.answer.set_result(action)
        self._pending = asked = await self._next_question(self._program)
        if asked is None:
            return Step(done=True)
        news = _after(
            [*before.messages, read_reply(written_turn(action), splits=False)], asked.messages
        )
        if news is None or asked.tools != before.tools:
            return Step(opening=Observation(messages=asked.messages, tools=asked.tools))
        return Step(messages=news)

    async def grade(self) -> Grade | None:
        """A program that was cut short is told so, and may still say how it went."""
        if self._program is None:
            return None
        was_cut = self._pending is not None
        self._refuse_all()
        cut = None if self._truncated_reward is None else Grade(reward=self._truncated_reward, success=False)
        ended, _ = await asyncio.wait({self._program}, timeout=self._grace_seconds)
        if was_cut and (not ended or self._program.exception() is not None):
            return cut
        return grade_from(self._program.result(), by=f"the program of task {self._task.key}")

    async def close(self) -> None:
        self._refuse_all()
        try:
            if self._program is not None:
                self._program.cancel()
                await asyncio.gather(self._program, return_exceptions=True)
        finally:
            await self._gateway.leave(self._key)

    def _refuse_all(self) -> None:
        """The episode is over: whoever asks, or waits to be heard, is told so."""
        self._is_over = True
        waiting = [self._pending] if self._pending else []
        while not self._questions.empty():
            waiting.append(self._questions.get_nowait())
        for asked in waiting:
            if not asked.answer.done():
                asked.answer.set_exception(_over())

    async def _ask(self, body: ChatCompletionRequest) -> Message:
        if self._is_over:
            raise _over()
        if body.n > 1:
            raise ApiError(f"n={body.n}: an episode has one answer; ask with n=1", param="n")
        if body.logprobs or body.return_token_ids:
            raise ApiError(
                "logprobs and token ids are the run's own and not told here; leave them out",
                param="logprobs" if body.logprobs else "return_token_ids",
            )
        if body.stop_strings:
            raise ApiError(
                f"stop={list(body.stops)}: a turn ends where the run says; set "
                "generator.sampling_params.stop",
                param="stop",
            )
        messages = tuple(said.message() for said in body.messages)
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        await self._questions.put(_PendingRequest(messages=messages, tools=body.tool_specs, answer=answer))
        return await answer

    async def _next_question(self, agent_env: asyncio.Task[Reward]) -> _PendingRequest | None:
        """None: the program has ended. EnvError where it failed."""
        while not agent_env.done() or not self._questions.empty():
            asking = asyncio.create_task(self._questions.get())
            try:
                await asyncio.wait({asking, agent_env}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if asking.done():
                    self._pending = asking.result()  # to be told when the episode is over
                else:
                    asking.cancel()
            if asking.done() and not asking.result().answer.done():  # else who asked has gone
                return asking.result()
        if error := agent_env.exception():
            raise EnvError(f"the program failed: {type(error).__name__}: {error}") from error
        return None


async def _run(solve: AgentFn, task: Task, api: ApiCredentials) -> Reward:
    """EnvError for what would otherwise end more than the program."""
    thread: EnvThread | None = None
    try:
        if iscoroutinefunction(solve):
            result = solve(task, api)
        else:
            thread = EnvThread(f"program {task.key}", asyncio.Semaphore(1))
            result = await thread.call(solve, task, api)
        given: Reward = await result if isawaitable(result) else result
    except asyncio.CancelledError:
        if (own := asyncio.current_task()) is not None and own.cancelling():
            raise
        raise EnvError("the program cancelled itself") from None
    except SystemExit as error:
        raise EnvError(f"the program raised {error!r}") from None
    finally:
        if thread is not None:
            thread.end()
    return given


def _after(before: Sequence[Message], now: Sequence[Message]) -> tuple[Message, ...] | None:
    """What `now` says beyond `before`; None where it begins otherwise."""
    n = len(before)
    if [comparable_fields(message) for message in now[:n]] != [comparable_fields(message) for message in before]:
        return None
    return tuple(now[n:])


def _over() -> ApiError:
    return ApiError("the episode is over: its limits are those of the run", status=403)
