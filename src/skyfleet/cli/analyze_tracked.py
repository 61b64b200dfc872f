"""`skyfleet analyze wandb://entity/project/run`, or a `.wandb` file: the learning signal of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyfleet.analysis.formatting import NOTHING, format_count, percent, table
from skyfleet.terminal import print, sanitize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skyfleet.analysis.tracked_signal import TrackedSignal


def analyze_tracked(address: str, *, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    from skyfleet.analysis.tracked_signal import compute_tracked_signals
    from skyfleet.tracking.wandb_file import read_tracked_run

    run = read_tracked_run(address)
    signals = compute_tracked_signals(run.rows)
    if as_json:
        envs = {signal.env_key: asdict(signal) | {"advice": signal.advice} for signal in signals}
        result = {"run": run.name, "rows": len(run.rows), "finished": run.is_finished, "envs": envs}
        print(json.dumps(result, indent=2))
        return
    state = "" if run.is_finished else ", not finished"
    print(f"{sanitize(run.name)}: {format_count(len(run.rows), 'row')}{state}\n")
    print(format_signals(signals))
    print("\n" + "\n".join(sanitize(signal.advice) for signal in signals))


def format_signals(signals: Sequence[TrackedSignal]) -> str:
    header = (
        "environment",
        "steps",
        "variance per prompt",
        "steps with signal",
        "last quarter",
        "mixed groups",
        *_name_columns([signal.pass_metric for signal in signals], "{}"),
        *_name_columns([signal.eval_metric for signal in signals], "eval {} first", "eval {} last"),
    )
    rows = [
        (
            signal.env_key,
            str(signal.n_steps),
            f"{signal.variance_per_prompt:.4f}",
            percent(signal.steps_with_signal),
            percent(signal.recent_steps_with_signal),
            _share(signal.signal_ratio),
            _share(signal.pass_rate),
            _share(signal.eval_first),
            _share(signal.eval_last),
        )
        for signal in signals
    ]
    return table(header, rows)


def _name_columns(metrics: Sequence[str], *names: str) -> list[str]:
    """The metric of the rows; all of them if they differ, in the order of the rows."""
    found = "/".join(dict.fromkeys(metric for metric in metrics if metric)) or "passed"
    return [name.format(found) for name in names]


def _share(value: float | None) -> str:
    return NOTHING if value is None else percent(value, digits=1)
