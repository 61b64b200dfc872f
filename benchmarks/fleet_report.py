"""Tables of `benchmarks.gpu_fleet_recipe`: seconds per phase, memory beside its plan."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from skyfleet.trainer.available_memory import GIB
from skyfleet.trainer.fit_memory import FittedConfig

PHASES = ("rollout", "learn", "sync_weights")


def plan_phases(fitted: FittedConfig, weight_bytes: int, kv_pool_gib: float) -> dict[str, float]:
    """The memory plan's GiB per phase, with the KV cache that the engine really took."""
    plan = fitted.plan
    if plan is None:
        return {}
    held = sum(part.n_bytes for part in plan.held if part.name != "KV cache") + weight_bytes
    names = {"rollouts": "rollout", "update": "learn", "optimizer step": "optimizer step"}
    return {
        names.get(name, name): round((held + sum(p.n_bytes for p in phase)) / GIB + kv_pool_gib, 2)
        for name, phase in zip(plan.phase_names, plan.phases, strict=True)
    }


def format_tables(record: dict[str, Any], recipe: str) -> list[str]:
    rows, planned = record["steps"], record["planned_gib"]
    lines = [
        "| step | rollout s | learn s | sync s | whole step s | episodes | long | longest | tokens | sampled | tool calls |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for number, row in enumerate(rows, 1):
        seconds = [row["phases"].get(phase, {}).get("seconds", "") for phase in PHASES]
        cells = [number, *seconds, row["seconds"], row["episodes"], row["long_episodes"],
                 row["longest"], row["tokens"], row["sampled_tokens"], row["tool_calls"]]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [
        "",
        "| phase | planned GiB | measured GiB | measured / planned |",
        "|---|--:|--:|--:|",
    ]
    for phase in ("rollout", "learn"):
        peaks = [row["phases"][phase]["peak_gib"] for row in rows if phase in row["phases"]]
        peak, plan = max(peaks, default=0.0), planned.get(phase, 0.0)
        lines.append(f"| {phase} | {plan} | {peak} | {peak / plan if plan else 0:.3f} |")
    lines += ["", *record["verdict"]]
    if extrapolated := record["extrapolated"]:
        lines.append(f"extrapolated to {recipe}, not measured: {extrapolated}")
    return lines


def extrapolate(rows: Sequence[dict[str, Any]], *, factor: float) -> dict[str, float]:
    """Rollouts and learning in proportion to the episodes, from the steps after the first."""
    later = rows[1:] or rows
    seconds = {
        phase: factor * median(row["phases"][phase]["seconds"] for row in later)
        for phase in ("rollout", "learn")
    }
    return {f"{phase}_seconds": round(value) for phase, value in seconds.items()} | {
        "step_seconds": round(sum(seconds.values()))
    }


def judge(rows: Sequence[dict[str, Any]], n_steps: int, long_tokens: int) -> list[str]:
    n_long = [row["long_episodes"] for row in rows]
    failed = [sentence for row in rows for sentence in row["failed"]]
    n_calls = sum(row["tool_calls"] for row in rows)
    n_turns = sum(row["turns"] for row in rows)
    return [
        f"steps: {len(rows)} of {n_steps}; failed episodes: {len(failed)} {failed[:2]}",
        f"episodes beyond {long_tokens} tokens per step: {n_long}; turns with a tool call: {n_calls} of {n_turns}",
    ]
