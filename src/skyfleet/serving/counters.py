"""Counters: what the server has done so far, as Prometheus reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Counters:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """By path and status; 499 is a client that went away."""
        self.turns_running = 0
        self.turns = 0
        self.turn_seconds = 0.0
        self.prompt_tokens = 0
        self.generated_tokens = 0

    @contextmanager
    def turn(self, n_prompt: int) -> Iterator[None]:
        start = perf_counter()
        self.turns_running += 1
        self.prompt_tokens += n_prompt
        try:
            yield
        finally:
            self.turns_running -= 1
            self.turns += 1
            self.turn_seconds += perf_counter() - start

    def text(self, policy_version: int) -> str:
        requests = [
            f'skyfleet_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self.requests.items())
        ]
        numbers = (
            ("turns_total", "counter", "Turns that ended, also those broken off.", self.turns),
            ("turn_seconds_total", "counter", "Seconds those took.", f"{self.turn_seconds:.6f}"),
            ("turns_running", "gauge", "Turns under way.", self.turns_running),
            ("prompt_tokens_total", "counter", "Tokens of prompts.", self.prompt_tokens),
            ("generated_tokens_total", "counter", "Tokens sampled.", self.generated_tokens),
            ("policy_version", "gauge", "The weights that are served.", policy_version),
        )
        lines = [*_described("requests_total", "counter", "Requests answered."), *requests]
        for name, kind, meaning, number in numbers:
            lines += (*_described(name, kind, meaning), f"skyfleet_{name} {number}")
        return "\n".join([*lines, ""])


def _described(name: str, kind: str, meaning: str) -> tuple[str, str]:
    return f"# HELP skyfleet_{name} {meaning}", f"# TYPE skyfleet_{name} {kind}"
