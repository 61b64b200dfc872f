"""The user simulators of tau-bench and tau2, unmodified, as users."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import import_module
from typing import Any

from skyfleet.config.environment import TauSuites
from skyfleet.envs.users.user import STOP, UserFailure, UserFailureKind, UserTurn


class PackageUser:
    """tau-bench's simulator. It blocks, so it runs in a thread; what it raises is a failure."""

    def __init__(self, load: Callable[[], Any], instruction: str) -> None:
        """Loading it asks the model already."""
        self._load, self._instruction = load, instruction
        self._simulator: Any = None

    @classmethod
    def of_tau_bench(cls, section: TauSuites, instruction: str) -> PackageUser:
        def load() -> Any:
            return import_module("tau_bench.envs.user").load_user(
                user_strategy=section.package_user,
                model=section.user_model,
                provider=section.user_provider,
            )

        return cls(load, instruction)

    async def open(self) -> UserTurn:
        def open_simulator() -> str:
            self._simulator = self._load()
            return str(self._simulator.reset(instruction=self._instruction))

        return await self._ask(open_simulator)

    async def reply(self, agent_message: str) -> UserTurn:
        return await self._ask(lambda: str(self._simulator.step(agent_message)))

    async def aclose(self) -> None: ...

    async def _ask(self, ask: Callable[[], str]) -> UserTurn:
        try:
            text = await asyncio.to_thread(ask)
        except Exception as error:  # litellm raises exceptions of many providers
            detail = " ".join(f"{type(error).__name__}: {error}".split())
            failure = UserFailure(kind=UserFailureKind.ENDPOINT, detail=detail)
            return UserTurn(text="", is_done=True, failure=failure)
        return UserTurn(text=text, is_done=STOP in text)
