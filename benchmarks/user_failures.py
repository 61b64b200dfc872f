"""Precision and recall of the rules for user failures, on dialogues labelled by somebody who has not seen them.

`python -m benchmarks.user_failures` reads `tests/data/user_dialogues.jsonl`, its labels
`user_dialogues_labels.jsonl` and the sources `user_dialogues_sources.json`, and prints the table of
docs/conversations.md. Without labels it prints what the rules find, by source.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyfleet.envs.users.failures import find_failure
from skyfleet.envs.users.scenario import Scenario
from skyfleet.metrics.intervals import wilson

DATA = Path(__file__).parents[1] / "tests" / "data"
KINDS = ("empty_reply", "loop", "leaked_answer", "broke_character")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    n_found: int
    n_labelled: int
    n_both: int

    @classmethod
    def of(cls, found: Iterable[str], labelled: Iterable[str]) -> Scores:
        """Of the dialogues in which the rules found a failure, and those labelled with one."""
        first, second = set(found), set(labelled)
        return cls(n_found=len(first), n_labelled=len(second), n_both=len(first & second))

    def format(self) -> str:
        return (
            f"{self.n_labelled} | {self.n_found} | {_share(self.n_both, self.n_found)} | "
            f"{_share(self.n_both, self.n_labelled)}"
        )


def main() -> None:
    if not (DATA / "user_dialogues.jsonl").exists():
        raise SystemExit(
            f"{DATA}/user_dialogues.jsonl is missing; write it with python -m benchmarks.user_dialogues"
        )
    dialogues = _read_rows(DATA / "user_dialogues.jsonl")
    sources = json.loads((DATA / "user_dialogues_sources.json").read_text())
    found = {one["id"]: find_kinds(one) for one in dialogues}
    groups = {
        one["id"]: "model" if sources[one["id"]] == "smollm2" else "rules" for one in dialogues
    }
    labels_path = DATA / "user_dialogues_labels.jsonl"
    if not labels_path.exists():
        counts = Counter((groups[key], kind) for key, kinds in found.items() for kind in kinds)
        print(f"{len(dialogues)} dialogues without labels; dialogues in which the rules find:")
        for (group, kind), n in sorted(counts.items()):
            print(f"  {group}: {kind} {n}")
        return
    labels = {
        row["id"]: {one["kind"] for one in row["failures"]} for row in _read_rows(labels_path)
    }
    if missing := sorted(found.keys() - labels.keys()):
        raise SystemExit(f"{labels_path}: {missing[0]} has no label; label every dialogue")
    print(format_table(found, labels, groups))


def find_kinds(dialogue: Mapping[str, Any]) -> set[str]:
    """Return the kinds of failure that the rules find, message by message."""
    scenario = Scenario.model_validate(dialogue["scenario"])
    agent: list[str] = []
    user: list[str] = []
    kinds: set[str] = set()
    for message in dialogue["messages"]:
        text = message["text"]
        if message["role"] == "agent":
            agent.append(text)
            continue
        if failure := find_failure(scenario, agent, user, text):
            kinds.add(failure.kind.value)
        user.append(text)
    return kinds


def format_table(
    found: Mapping[str, set[str]], labels: Mapping[str, set[str]], groups: Mapping[str, str]
) -> str:
    lines = [
        "| failure | dialogues | labelled | found | precision | recall |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for group in ("model", "rules", "all"):
        keys = [key for key in found if group in (groups[key], "all")]
        for kind in (*KINDS, "any"):
            scores = Scores.of(_with(found, keys, kind), _with(labels, keys, kind))
            lines.append(f"| {kind} | {group} ({len(keys)}) | {scores.format()} |")
    return "\n".join(lines)


def _with(kinds: Mapping[str, set[str]], keys: Sequence[str], kind: str) -> list[str]:
    return [key for key in keys if (kinds[key] if kind == "any" else kind in kinds[key])]


def _share(part: int, whole: int) -> str:
    if not whole:
        return "-"
    low, high = wilson(part / whole, whole)
    return f"{part / whole:.2f} ({low:.2f} to {high:.2f})"


def _read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


if __name__ == "__main__":
    main()
