"""Gradients of sharded learners against one learner, and checkpoints read by other numbers of ranks.

    python -m benchmarks.sharded_equality

Real processes over gloo on a CPU, in float32. The error of a tensor is relative to its norm; of one
that is zero but for rounding, such as a key bias, to the norm of all gradients, times 100.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.fakes.rank_processes import run_ranks
from tests.fakes.sharded_cases import (
    LAYOUTS,
    build_cases,
    compute_update,
    compute_updates,
    continue_update,
    relative_errors,
    runs_in,
)

from skyfleet.learner.process_ranks import RankLayout

_RESHARDED = {"one learner": None, "1": RankLayout(), "2": LAYOUTS["2"], "3": RankLayout(shards=3)}


def main() -> None:
    print("Largest relative error of a gradient over all tensors and ranks\n")
    print_equality()
    print("\nLargest difference of a weight after one update, a checkpoint and a second update\n")
    print_resharding()


def print_equality() -> None:
    columns: dict[str, dict[str, float]] = {}
    expected = {name: compute_update(name) for name in build_cases()}
    for layout, ranks in LAYOUTS.items():
        cases = [name for name in build_cases() if runs_in(name, layout)]
        outcomes = run_ranks(ranks.world_size, compute_updates, cases, ranks)
        columns[layout] = {
            name: max(
                max(relative_errors(of_rank[name].gradients, expected[name].gradients).values())
                for of_rank in outcomes
            )
            for name in cases
        }
    _print_row("case", *columns)
    _print_row("---", *("---" for _ in columns))
    for name in expected:
        _print_row(name, *(_format(column.get(name)) for column in columns.values()))


def print_resharding() -> None:
    _print_row("written by", *(f"read by {name}" for name in _RESHARDED))
    _print_row("---", *("---" for _ in _RESHARDED))
    with TemporaryDirectory() as scratch:
        for case in ("plain", "LoRA", "critic"):
            begun = _make(Path(scratch) / case)
            compute_update(case, save=begun)
            expected = compute_update(case, load=begun).weights
            for writer, layout in _RESHARDED.items():
                saved = _make(Path(scratch) / f"{case}-{writer}")
                _run(layout, case, None, saved)
                differences = []
                for reader in _RESHARDED.values():
                    weights = _run(reader, case, saved, None).weights
                    gaps = [float((weights[n] - w).abs().max()) for n, w in expected.items()]
                    differences.append(_format(max(gaps)))
                _print_row(f"{case}, {writer}", *differences)


def _run(layout: RankLayout | None, case: str, load: Path | None, save: Path | None) -> Any:
    if layout is None:
        return continue_update(case, None, load, save)
    return run_ranks(layout.world_size, continue_update, case, layout, load, save)[0]


def _make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.0e}"


def _print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
