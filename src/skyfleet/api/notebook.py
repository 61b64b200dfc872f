"""A progress bar for notebooks, where the console can only print lines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape
from typing import Any

from skyfleet.tracking.console import summary
from skyfleet.trainer.callbacks import StepResult


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel."""
    shell = sys.modules.get("IPython")
    instance: Any = shell.get_ipython() if shell is not None else None
    return getattr(instance, "kernel", None) is not None


def show_progress(
    on_step: Callable[[StepResult], Any] | None, *, total_steps: int | None
) -> Callable[[StepResult], Any] | None:
    """In a notebook: the callback, and a bar that moves with every step. Elsewhere: the callback."""
    if not in_notebook():
        return on_step
    bar = _Bar(total_steps)

    def call(step: StepResult) -> Any:
        bar.update(step)
        return on_step(step) if on_step is not None else None

    return call


class _Bar:
    def __init__(self, total_steps: int | None) -> None:
        self._total, self._handle = total_steps, None

    def update(self, step: StepResult) -> None:
        from IPython.display import HTML, display

        shown = HTML(self._html(step))
        if self._handle is None:
            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)

    def _html(self, step: StepResult) -> str:
        limit = f" max='{self._total}'" if self._total else ""
        of = f"/{self._total}" if self._total else ""
        text = escape(f"step {step.number}{of}  {summary(step.metrics)}")
        return f"<progress value='{step.number}'{limit}></progress> <code>{text}</code>"
