"""ConsoleTracker: progress bars on a terminal, lines of text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from math import isfinite, nan
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from skyfleet.chat.message import Message
from skyfleet.redaction import redact
from skyfleet.streams import make_lasting, open_stdout, remember_streams
from skyfleet.terminal import sanitize, sanitize_lines
from skyfleet.trajectories.trajectory import Group

if TYPE_CHECKING:
    from rich.progress import TaskID

TICK_SECONDS = 15.0
TICK_FRACTION = 0.1
PASS_AT = "reward/avg_pass_at_"
ENDING = "generate/ending_"
PHASES = {"generate": "generate", "train_critic_and_policy": "train"}
"""The timings that a line shows, and what it calls them."""

_MAX_CHARACTERS = 20_000
"""Of a message in an example."""


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel."""
    shell = sys.modules.get("IPython")
    instance: Any = shell.get_ipython() if shell is not None else None
    return getattr(instance, "kernel", None) is not None


class ConsoleTracker:
    """Shows the training steps as one phase; `progress` adds further phases."""

    def __init__(
        self,
        *,
        total_steps: int | None = None,
        done_steps: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        remember_streams()
        lasting, self._clock = make_lasting(stream or open_stdout()), clock
        self._screen = _Bars(lasting) if lasting.isatty() else _Lines(lasting)
        self._training = _Phase("step", total=total_steps, done=done_steps, clock=clock)
        self._screen.open(self._training)
        self._failure = ""

    def explain(self, failure: str) -> None:
        """Name on the next step's line why none of its episodes has a grade."""
        self._failure = redact(failure)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._training.done = step
        self._training.detail = summary(metrics, failure=self._failure)
        self._failure = ""
        if step == 0:
            self._training.restart()  # the estimate leaves out what ran before step 1
        if not in_notebook():  # a notebook has a bar of its own
            self._screen.show(self._training)

    def note(self, text: str) -> None:
        """Print a line, above the bars on a terminal."""
        self._screen.note(sanitize_lines(redact(text)))

    @contextmanager
    def progress(self, name: str, total: int, *, done: int = 0) -> Iterator[Callable[[], None]]:
        """`with console.progress("warm start", 64) as advance:`; call `advance()` after each item."""
        phase = _Phase(name, total=total, done=done, clock=self._clock)
        self._screen.open(phase)

        def advance() -> None:
            phase.done += 1
            self._screen.tick(phase)

        try:
            yield advance
        finally:
            self._screen.finish(phase)

    def sync(self) -> None:
        """Nothing is stored."""

    def close(self) -> None:
        self._screen.close()


def summary(metrics: Mapping[str, float], *, failure: str = "") -> str:
    """`reward 0.412  pass@4 0.500  generate 12.1 s  train 3.0 s`, without what is not logged.

    A step that teaches nothing says why; `failure` is the reason if no episode has a grade.
    """
    parts = []
    if isfinite(reward := metrics.get("reward/avg_raw_reward", nan)):
        parts.append(f"reward {reward:.3f}")
    parts += [
        f"pass@{key.removeprefix(PASS_AT)} {value:.3f}"
        for key, value in metrics.items()
        if key.startswith(PASS_AT)
    ]
    if metrics.get("loss/num_samples") == 0:
        endings = {k.removeprefix(ENDING): v for k, v in metrics.items() if k.startswith(ENDING)}
        ending = next((ending for ending, v in endings.items() if v == 1 and ending != "done"), "")
        cause = failure or (f"every episode ended {ending}" if ending else "")
        parts.append(f"no learning signal: {cause}" if cause else "no learning signal")
    elif metrics.get("loss/avg_raw_advantages_abs") == 0:
        differ = metrics.get("train/min_reward") != metrics.get("train/max_reward")
        which = "rewards of each task" if differ else "rewards"
        parts.append(f"no learning signal: all {which} equal")
    parts += [
        f"{label} {metrics[f'timing/{phase}']:.1f} s"
        for phase, label in PHASES.items()
        if f"timing/{phase}" in metrics
    ]
    return "  ".join(parts)


class _Phase:
    """One long operation and its progress."""

    def __init__(
        self, name: str, *, total: int | None, done: int = 0, clock: Callable[[], float]
    ) -> None:
        self.name, self.total, self.done, self.detail = name, total, done, ""
        self.clock = clock
        self.restart()

    def restart(self) -> None:
        """Base the time estimate on the progress from now on."""
        self._first, self._started = self.done, self.clock()

    def __str__(self) -> str:
        """`step 3/10  eta 0:07:00  reward 0.500`"""
        count = f"{self.name} {self.done}" + (f"/{self.total}" if self.total else "")
        # Metric and set names come from data files.
        return sanitize("  ".join(filter(None, (count, self._eta(), self.detail))))

    def _eta(self) -> str:
        # rich's own estimate only covers the last 30 seconds.
        if not self.total or not self._first < self.done < self.total:
            return ""
        seconds_each = (self.clock() - self._started) / (self.done - self._first)
        return f"eta {timedelta(seconds=round(seconds_each * (self.total - self.done)))}"


class _Lines:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._printed: dict[_Phase, tuple[int, float]] = {}

    def open(self, phase: _Phase) -> None:
        self._printed[phase] = phase.done, phase.clock()

    def show(self, phase: _Phase) -> None:
        self._printed[phase] = phase.done, phase.clock()
        self.note(str(phase))

    def tick(self, phase: _Phase) -> None:
        """Print after every tenth and every 15 seconds; `finish` prints the last line."""
        done, printed_at = self._printed[phase]
        fraction = (phase.done - done) / phase.total if phase.total else 0.0
        if fraction >= TICK_FRACTION or phase.clock() - printed_at >= TICK_SECONDS:
            self.show(phase)

    def finish(self, phase: _Phase) -> None:
        if self._printed.pop(phase)[0] != phase.done:
            self.note(str(phase))

    def note(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """The caller owns the stream."""


class _Bars:
    def __init__(self, stream: TextIO) -> None:
        # Imported here, so that a machine without a terminal does not need rich.
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


def format_example(step: int, groups: Iterable[Group]) -> str:
    """The transcript of one episode of the step: the best attempt at its first task."""
    attempts = next(iter(groups)).trajectories
    best = max(attempts, key=lambda t: (t.reward is not None, t.reward or 0.0))
    reward = "reward unknown" if best.reward is None else f"reward {best.reward:g}"
    header = f"step {step}, {best.task_key}: {best.ending}, {reward}"
    messages = [
        *best.prompt,
        *(message for turn in best.turns for message in (turn.action, *turn.replies)),
    ]
    return "\n".join([header, *(line for message in messages for line in _format(message))])


def _format(message: Message) -> Iterator[str]:
    yield _cut(f"[{message.role}] {message.text}".rstrip())
    for call in message.tool_calls:
        mark = f" (repaired: {call.repair})" if call.repair else ""
        yield _cut(f"-> {call.name}({dict(call.arguments)}){mark}")
    for text in message.malformed_calls:
        yield _cut(f"?? {text}")


def _cut(text: str) -> str:
    """A page of a megabyte would fill the terminal, and be searched for secrets."""
    n_more = len(text) - _MAX_CHARACTERS
    return f"{text[:_MAX_CHARACTERS]}... ({n_more} more characters)" if n_more > 0 else text
