"""LoopbackVllm: vLLM's routes on this machine, with an engine and weights of ours behind them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Message, Receive, Scope, Send
from tests.fakes.tiny_policy import CAPACITY, TinyPolicy
from torch import Tensor, nn

from skyfleet.chat.renderers import make_renderer
from skyfleet.engines.vllm_worker import WeightUpdateExtension
from skyfleet.models.decoder import Decoder
from skyfleet.models.loading import LoadedModel

MEMORY = ("weights", "kv_cache")
STEERED = ("sleep", "wake_up", "pause", "resume", "reset_prefix_cache")


class WorkerExtension(WeightUpdateExtension):
    """In a worker that has as much of vLLM's as is asked for there."""

    def __init__(self, module: nn.Module, n_workers: int, **model: object) -> None:
        self.module, self.device = module, torch.device("cpu")
        self.model_runner = SimpleNamespace(get_model=lambda: module)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                dtype=torch.float32, hf_text_config=module.config, **model
            ),
            parallel_config=SimpleNamespace(world_size=n_workers),
        )


class LoopbackVllm:
    """An ASGI app. `received` lists its requests, in order."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        capacity: int = CAPACITY,
        version: str | None = "0.23.0",
        dev_mode: bool = True,
        extension: bool = True,
        logprobs_mode: str = "processed_logprobs",
        sleep_mode: bool = False,
        quantization: str | None = None,
        n_workers: int = 1,
        n_replicas: int = 1,
    ) -> None:
        """It has weights of its own, which are those of `loaded` at first."""
        self.received: list[str] = []
        self.loaded: list[str] = []
        self.salts: list[str] = []
        self.asleep: list[str] = []
        """Which of its memory is given back."""
        self.paused, self.is_healthy = False, True
        self.breaks = ""
        """The route that fails; "sums" spoils one tensor, "about" leaves one thing out."""
        self.mounted_at = ""
        """Under which the trainer's folders are seen from here."""
        module = deepcopy(loaded.module)
        self._new_extension = partial(
            WorkerExtension,
            module,
            n_workers,
            logprobs_mode=logprobs_mode,
            enable_sleep_mode=sleep_mode,
            quantization=quantization,
        )
        self._extension = extension
        self.start_again()
        policy_model = TinyPolicy(
            tokenizer=loaded.tokenizer,
            decoder=Decoder(module, max_positions=capacity),
            renderer=make_renderer(loaded.tokenizer),
        )
        self._engine = policy_model.engine(capacity=capacity)
        self._policy_app = policy_model.app(self._engine, max_model_len=capacity)
        steering = [
            Route("/is_sleeping", self._is_sleeping),
            *(Route(f"/{name}", self._receive, methods=["POST"]) for name in STEERED),
            Route("/collective_rpc", self._rpc, methods=["POST"]),
            Route(
                "/server_info",
                lambda _: JSONResponse(
                    {"vllm_config": f"tp=1, data_parallel_size={n_replicas}, x=1"}
                ),
            ),
        ]
        received = [Route("/version", lambda _: JSONResponse({"version": version}))]
        self._app = Starlette(
            routes=[
                Route("/health", lambda _: Response(status_code=200 if self.is_healthy else 503)),
                *(received if version else ()),
                *(steering if dev_mode else ()),
                Mount("/", self._generate),
            ]
        )

    def start_again(self) -> None:
        self._worker = self._new_extension()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        received: list[Message] = []

        async def replayed() -> Message:
            received.append(await receive())
            return received[-1]

        if scope["method"] == "POST" and (self.breaks == "completions" or self._is_still):
            # vLLM would keep a turn waiting that is asked for while it is asleep or paused.
            why = "asleep or paused" if self._is_still else "no turns today"
            await failure(why)(scope, receive, send)
            return
        await self._policy_app(scope, replayed, send)
        if body := b"".join(message.get("body", b"") for message in received):
            self.salts.append(json.loads(body)["cache_salt"])

    async def _is_sleeping(self, request: Request) -> Response:
        return JSONResponse({"is_sleeping": self._is_still})

    @property
    def _is_still(self) -> bool:
        return bool(self.asleep) or self.paused

    async def _receive(self, request: Request) -> Response:
        route = request.url.path.removeprefix("/")
        asked = [value for _, value in request.query_params.multi_items()]
        self.received.append(" ".join([route, *asked]))
        if route == self.breaks:
            return failure(f"{route} broke")
        await self._engine.sleep()  # nothing that was cached is kept
        woken = request.query_params.getlist("tags") or MEMORY
        match route:
            case "sleep":
                self.asleep = [*MEMORY]
                if request.query_params["level"] == "2":
                    forget_weights(self._worker.module)
            case "wake_up":
                self.asleep = [tag for tag in self.asleep if tag not in woken]
                self.paused = self.paused and bool(self.asleep)
            case "pause" | "resume":
                self.paused = route == "pause"
        return Response()

    async def _rpc(self, request: Request) -> Response:
        asked = await request.json()
        method, args = asked["method"], asked["args"]
        if self.breaks == "collective_rpc":
            return failure(f"{method} broke")
        if not self._extension:
            return failure(
                f"Worker failed with error ''Worker' object has no attribute '{method}''"
            )
        if "weights" in self.asleep and method != "skyfleet_about":
            return failure(f"Worker failed with error 'no memory is mapped for {method}'")
        if method == "skyfleet_load_file":
            self.received.append("load")
            self.loaded += args
            args = [f"{self.mounted_at}{path}" for path in args]
        try:
            answer = getattr(self._worker, method)(*args)
        except FileNotFoundError as error:
            return failure(f"Worker failed with error '{error}'")
        if method == "skyfleet_sums" and self.breaks == "sums":
            answer["held"]["model.norm.weight"] = [0] * 8
        if method == "skyfleet_about" and self.breaks == "about":
            del answer["sizes"]
        kept = answer if answer is None or isinstance(answer, dict | list) else str(answer)
        return JSONResponse({"results": [kept]})


def failure(message: str) -> Response:
    """As vLLM writes it."""
    return JSONResponse({"error": {"message": message, "code": 500}}, status_code=500)


def forget_weights(module: nn.Module) -> None:
    with torch.no_grad():
        for weight in module.parameters():
            weight.zero_()


def replace_weights(extension: WorkerExtension, weights: Iterable[tuple[str, Tensor]]) -> None:
    """In place of `vllm_worker._replace`, which needs vLLM."""
    extension.module.load_state_dict(dict(weights), strict=False)
