"""ConsoleTracker: how far the run is, as bars on a terminal and as lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import TaskID

TICK_SECONDS = 15.0
TICK_FRACTION = 0.1
PASS_AT = "reward/avg_pass_at_"
ENDING = "generation/ending_"


class ConsoleTracker:
    """Training is one phase; `progress` opens others beside it."""

    def __init__(
        self,
        *,
        total_steps: int | None = None,
        done_steps: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        stream, self._clock = stream or sys.stdout, clock
        self._screen = _Bars(stream) if stream.isatty() else _Lines(stream)
        self._training = _Phase("step", total=total_steps, done=done_steps, clock=clock)
        self._screen.open(self._training)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._training.done, self._training.detail = step, summary(metrics)
        if step == 0:
            self._training.restart()  # what came before the first step was not a step
        self._screen.show(self._training)

    def note(self, text: str) -> None:
        """A sentence above the bars."""
        self._screen.note(text)

    @contextmanager
    def progress(self, name: str, total: int, *, done: int = 0) -> Iterator[Callable[[], None]]:
        """`with console.progress("warm start", 64) as advance:` and `advance()` after each."""
        phase = _Phase(name, total=total, done=done, clock=self._clock)
        self._screen.open(phase)

        def advance() -> None:
            phase.done += 1
            self._screen.tick(phase)

        try:
            yield advance
        finally:
            self._screen.finish(phase)

    def close(self) -> None:
        self._screen.close()


def summary(metrics: Mapping[str, float]) -> str:
    """`reward 0.412  pass@4 0.500  rollout 12.1 s  learn 3.0 s`, or as much of it as there is.

    A step in which no attempts could be told apart says so.
    """
    words = []
    if "reward/avg_raw_reward" in metrics:
        words.append(f"reward {metrics['reward/avg_raw_reward']:.3f}")
    words += [
        f"pass@{key.removeprefix(PASS_AT)} {value:.3f}"
        for key, value in metrics.items()
        if key.startswith(PASS_AT)
    ]
    if metrics.get("loss/num_samples") == 0:
        endings = {k.removeprefix(ENDING): v for k, v in metrics.items() if k.startswith(ENDING)}
        cause = next((ending for ending, v in endings.items() if v == 1 and ending != "done"), "")
        words.append(f"nothing to learn from{f': every episode ended {cause}' if cause else ''}")
    words += [
        f"{phase} {metrics[f'timing/{phase}']:.1f} s"
        for phase in ("rollout", "learn")
        if f"timing/{phase}" in metrics
    ]
    return "  ".join(words)


class _Phase:
    """A long piece of work and how far it is."""

    def __init__(
        self, name: str, *, total: int | None, done: int = 0, clock: Callable[[], float]
    ) -> None:
        self.name, self.total, self.done, self.detail = name, total, done, ""
        self.clock = clock
        self.restart()

    def restart(self) -> None:
        """Estimate from here on."""
        self._first, self._started = self.done, self.clock()

    def __str__(self) -> str:
        """`step 3/10  eta 0:07:00  reward 0.500`"""
        count = f"{self.name} {self.done}" + (f"/{self.total}" if self.total else "")
        return "  ".join(filter(None, (count, self._eta(), self.detail)))

    def _eta(self) -> str:
        # Not rich's estimate, which forgets steps older than 30 seconds.
        if not self.total or not self._first < self.done < self.total:
            return ""
        seconds_each = (self.clock() - self._started) / (self.done - self._first)
        return f"eta {timedelta(seconds=round(seconds_each * (self.total - self.done)))}"


class _Lines:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._told: dict[_Phase, tuple[int, float]] = {}

    def open(self, phase: _Phase) -> None:
        self._told[phase] = phase.done, phase.clock()

    def show(self, phase: _Phase) -> None:
        self._told[phase] = phase.done, phase.clock()
        self.note(str(phase))

    def tick(self, phase: _Phase) -> None:
        """A line when another tenth is done or a while has passed; the end tells the rest."""
        done, told_at = self._told[phase]
        fraction = (phase.done - done) / phase.total if phase.total else 0.0
        if fraction >= TICK_FRACTION or phase.clock() - told_at >= TICK_SECONDS:
            self.show(phase)

    def finish(self, phase: _Phase) -> None:
        if self._told.pop(phase)[0] != phase.done:
            self.note(str(phase))

    def note(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """The stream is its owner's."""


class _Bars:
    def __init__(self, stream: TextIO) -> None:
        # Here, so that a machine without a terminal needs no rich.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=16),
            TextColumn("{task.description}", markup=False),
            console=Console(file=stream),
        )
        self._bars: dict[_Phase, TaskID] = {}
        self._progress.start()

    def open(self, phase: _Phase) -> None:
        self._bars[phase] = self._progress.add_task(str(phase), total=phase.total)
        self.show(phase)

    def show(self, phase: _Phase) -> None:
        self._progress.update(self._bars[phase], completed=phase.done, description=str(phase))

    tick = show

    def finish(self, phase: _Phase) -> None:
        self._progress.remove_task(self._bars.pop(phase))
        self.note(str(phase))

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()
