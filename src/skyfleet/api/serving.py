"""Serve a policy behind OpenAI's API from a script or a notebook."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

from skyfleet.api.background import run_sync
from skyfleet.api.config import ConfigLike
from skyfleet.api.inference import PolicyEngine, inference_config, open_no_env
from skyfleet.api.models import resolve_model
from skyfleet.errors import ConfigError
from skyfleet.serving.access import (
    AccessPolicy,
    build_access_policy,
    check_bind,
    choose_family,
    format_url,
    read_token,
    strip_brackets,
)


class Server:
    """A running server; `stop` ends it, `wait` blocks until Ctrl-C.

    >>> import skyfleet as sf
    >>> with sf.serve("tiny", port=0, name="mine") as server:
    ...     print(server.name, server.url.endswith("/v1"))
    mine True
    """

    def __init__(
        self, url: str, name: str, uvicorn_server: Any, policy: PolicyEngine, *, owns_policy: bool
    ) -> None:
        self.url, self.name = url, name
        self._server, self._policy, self._owns_policy = uvicorn_server, policy, owns_policy
        self._serving: asyncio.Task[None] | None = None

    async def start(self, listening: socket.socket) -> None:
        # Before uvicorn has started, so that no client has to wait for that.
        listening.listen(1024)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))

    def stop(self) -> None:
        """Stop serving; a policy that was loaded for it is closed."""
        run_sync(self._stop())

    def wait(self) -> None:
        """Block until Ctrl-C, then stop."""
        try:
            run_sync(self._wait())
        except KeyboardInterrupt:
            self.stop()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Server({self.url!r}, model={self.name!r})"

    async def _wait(self) -> None:
        if self._serving is not None:
            await asyncio.shield(self._serving)

    async def _stop(self) -> None:
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        self._policy.served_at = None
        if self._owns_policy:
            await self._policy.aclose()


def serve(
    model: object,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    config: ConfigLike = None,
    allowed_hosts: Sequence[str] = (),
) -> Server:
    """Serve a model or a run behind OpenAI's API, in the background; port 0 takes a free one.

    Clients need the key in SKYFLEET_API_KEY if that is set; a `host` beyond this machine needs it.
    `allowed_hosts` are further names that clients may use for this server. In a script,
    `sf.serve(...).wait()`.

    >>> import skyfleet as sf
    >>> with sf.serve("tiny", port=0, name="mine") as server:
    ...     with sf.load_policy(server.url) as policy:
    ...         message = policy.generate("Hello", sampling=sf.Sampling(max_tokens=4))
    >>> message.role
    'assistant'
    """
    token = read_token()
    check_bind(host, token, key="sf.serve: host")
    if isinstance(model, PolicyEngine):
        if config is not None:
            raise ConfigError(
                "sf.serve(policy, config=...): the policy has a configuration; pass config to "
                "sf.load_policy"
            )
        policy, owned = model, None
    else:
        source = resolve_model(model, where="sf.serve")
        policy = owned = PolicyEngine(source, inference_config(source, config))
    if policy.source.url is not None or policy.config.generator.is_remote:
        raise ConfigError(f"sf.serve: {policy.source.name} is served already; use its URL")
    access = build_access_policy(host, token=None, allowed_hosts=allowed_hosts)
    listening = _bind(strip_brackets(host), port)
    try:
        model_name = name or policy.config.trainer.run_name
        return run_sync(_serve(policy, owned, listening, model_name, token, access))
    except BaseException:
        listening.close()
        raise


def _bind(host: str, port: int) -> socket.socket:
    listening = socket.socket(choose_family(host), socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"sf.serve(host={host!r}, port={port}): {error.strerror}; choose another"
        ) from None
    return listening


async def _serve(
    policy: PolicyEngine,
    owned: PolicyEngine | None,
    listening: socket.socket,
    name: str,
    token: str | None,
    access: AccessPolicy,
) -> Server:
    from skyfleet.chat.tokenizer import encode
    from skyfleet.serving.listening import build_server
    from skyfleet.serving.server import serve_app
    from skyfleet.tasks.task import Task

    client = (
        await policy.open([Task(key="serve", env_key="env", prompt="Hello")], open_no_env)
    ).client
    assert client is not None
    generator = policy.config.generator
    app = serve_app(
        client.engine,
        client.renderer,
        encode=partial(encode, client.tokenizer),
        model=name,
        max_model_len=policy.config.max_episode_tokens,
        api_key=token,
        max_sessions=generator.max_num_seqs,
        template_kwargs=generator.chat_template_kwargs,
    )
    uvicorn_server = build_server(app, access, log_level="warning")
    host, port = listening.getsockname()[:2]
    server = Server(
        f"{format_url(host, port)}/v1", name, uvicorn_server, policy, owns_policy=owned is not None
    )
    await server.start(listening)
    policy.served_at = server.url
    return server
