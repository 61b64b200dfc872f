"""A progress bar for notebooks, where the console would print one line per step."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from skyfleet.redaction import redact
from skyfleet.tracking.console import in_notebook, summary
from skyfleet.trainer.callbacks import StepResult
from skyfleet.trajectories.trajectory import find_failure


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
        failure = None if any(g.graded for g in step.groups) else find_failure(step.groups)
        line = summary(step.metrics, failure=redact(failure or ""))
        text = escape(f"step {step.number}{of}  {line}")
        return f"<progress value='{step.number}'{limit}></progress> <code>{text}</code>"
