"""A stand-in for litellm while tau-bench and tau2 are imported.

Both import litellm for their LLM users, and tau2 also for its agents. The import takes seconds and
asks the network for prices; without an LLM user nothing of it is called. A function of the stand-in
loads the real package when it is called later.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

_NAMES = ("litellm", "litellm.caching", "litellm.caching.caching", "litellm.main")


@contextmanager
def stub_litellm() -> Iterator[None]:
    """Replace litellm inside this block, unless the program has imported the real one."""
    if "litellm" in sys.modules:
        yield
        return
    stubs = {name: _Stub(name) for name in _NAMES}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name, stub in stubs.items():
            del sys.modules[name]
            vars(stub)["_is_importing"] = False


class _Stub(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._is_importing = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        # Types occur in annotations only; everything else that the packages use is a function.
        return type(name, (), {}) if name[0].isupper() else self._defer(name)

    def _defer(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_importing:
                return None
            try:
                litellm = import_module("litellm")
            except ImportError as error:
                raise ImportError(
                    "the LLM users of tau-bench and tau2 need litellm: pip install litellm"
                ) from error
            # What tau2 has set on the module while it was imported, such as drop_params.
            settings = {k: v for k, v in vars(self).items() if not k.startswith("_")}
            vars(litellm).update(settings)
            return getattr(litellm, name)(*args, **kwargs)

        return call
