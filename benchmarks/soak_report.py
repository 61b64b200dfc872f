"""What a soak showed: calls and failures, restarts, episodes, checks of the run folder, learning."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from skyfleet.api.comparison import compare
from skyfleet.evaluation.report import read_reports
from skyfleet.evaluation.table import conclude
from skyfleet.metrics.intervals import mean_rate
from skyfleet.trajectories.archive import read_trajectories, train_path

EXPECTED_FINDINGS = {"unknown_grades"}
"""Sentinels that must find something if so many episodes fail; they only warn."""
INJECTED = "injected failure"


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def count_calls(logs: Iterable[Path]) -> dict[str, list[int]]:
    """By kind: calls and injected failures, summed over processes."""
    calls: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for log in logs:
        if rows := read_rows(log):
            calls.update(rows[-1]["calls"])
            failures.update(rows[-1]["failures"])
    return {kind: [calls[kind], failures[kind]] for kind in sorted(calls)}


def find_cause(output: Path, code: int, folder: Path) -> str:
    """The sentence a command ended with; `TRACEBACK` if there is none."""
    text = output.read_text(errors="replace") if output.exists() else ""
    sentence = text.rpartition("skyfleet: ")[2].strip() if "skyfleet: " in text else ""
    if code == 0:
        return ""
    if "Traceback (most recent call last)" in text:
        return f"TRACEBACK {text.strip().splitlines()[-1]}"
    if not sentence:
        last = text.strip().splitlines()[-1][:200] if text.strip() else ""
        sentence = f"exit code {code}: {last}"
    return sentence.replace(str(folder), "FOLDER")


def generalize(cause: str) -> str:
    """The cause without numbers, so that equal ones are counted together."""
    cause = re.sub(r"\([\d.]+ of [\d.]+ MB are free[^)]*\)", "", cause)
    cause = cause.partition("\n")[0].partition("; free some space")[0].partition("; fix that")[0]
    cause = cause.partition(". To resume")[0]
    return re.sub(r"\d+", "N", cause).strip()[:160]


def write_results(folder: Path, step: int, healthy: Sequence[Path]) -> None:
    """Print the tables, and write them to FOLDER/results.md."""
    lines = [
        *_list_calls(folder),
        *_list_restarts(folder),
        *_list_checks(folder, step),
        *_list_learning(folder, step, healthy),
    ]
    text = "\n".join(lines)
    (folder / "results.md").write_text(text + "\n")
    print(text)


def _list_calls(folder: Path) -> Iterable[str]:
    calls = count_calls(sorted((folder / "output").glob("faults_*.jsonl")))
    network = [row for row in read_rows(folder / "events.jsonl") if row["event"] == "network"][-1]
    answers = dict(network["failures"])
    calls["network request"] = [
        network["calls"].get("network request", 0),
        answers.pop("network request", 0),
    ]
    yield "| call | calls | failed | share |"
    yield "|---|---|---|---|"
    for kind, (n_calls, n_failed) in calls.items():
        yield f"| {kind} | {n_calls} | {n_failed} | {n_failed / max(1, n_calls):.1%} |"
    yield f"\nAnswers of the network: {', '.join(f'{k} {v}' for k, v in sorted(answers.items()))}."


def _list_restarts(folder: Path) -> Iterable[str]:
    ended = [
        row
        for row in read_rows(folder / "events.jsonl")
        if row["event"] == "ended" and row["by"] == "faults" and row["what"] == "train"
    ]
    failed = [row for row in ended if row["code"] != 0]
    waits, without_progress, last = 0, 0, None
    for row in ended:
        waits = waits + 1 if row["step"] == last else 0
        without_progress, last = max(without_progress, waits), row["step"]
    yield f"\n{len(ended)} processes, {len(failed)} restarts; at most {without_progress} in a row "
    yield "without a new checkpoint.\n"
    yield "| the process ended with | times |"
    yield "|---|---|"
    for cause, times in Counter(generalize(row["cause"]) for row in failed).most_common():
        yield f"| {cause} | {times} |"


def _list_checks(folder: Path, step: int) -> Iterable[str]:
    run = folder / "faults"
    rows = [row["step"] for row in read_rows(run / "metrics.jsonl")]
    episodes = [
        episode
        for number in range(1, step + 1)
        for episode in read_trajectories(train_path(run / "trajectories", number))
    ]
    failed = [episode for episode in episodes if episode.failure is not None]
    ungraded = [episode for episode in episodes if episode.grade is None]
    graded = [
        episode
        for episode in failed
        if episode.grade is not None
        and INJECTED in (episode.failure.detail if episode.failure else "")
    ]
    drafts = [
        path.name
        for path in run.rglob(".*")
        if path.suffix in (".draft", ".replaced") or path.name == ".lock"
    ]
    findings = Counter(row["sentinel"] for row in read_rows(run / "sentinels.jsonl"))
    unexpected = {name: n for name, n in findings.items() if name not in EXPECTED_FINDINGS}
    outputs = sorted((folder / "output").glob("faults_*.txt"))
    tracebacks = [p.name for p in outputs if "Traceback (most" in p.read_text(errors="replace")]
    settled = [row for row in read_rows(folder / "events.jsonl") if row["event"] == "settled"]
    yield "\n| check | result |"
    yield "|---|---|"
    yield f"| steps of the run with faults | {step} |"
    yield f"| the same command without faults ends it | exit code {settled[-1]['code']} |"
    yield f"| rows of metrics.jsonl | {_describe_rows(rows, step)} |"
    yield f"| episodes played, failed, ungraded | {len(episodes)}, {len(failed)}, {len(ungraded)} |"
    yield f"| failed by an injected failure and graded | {len(graded)} |"
    yield f"| drafts and locks that stay | {drafts or 0} |"
    yield f"| sentinels, beside unknown_grades ({findings['unknown_grades']}) | {unexpected or 0} |"
    yield f"| outputs with a traceback | {tracebacks or 0} |"
    for name in ("faults", "healthy"):
        log = max(
            (folder / "output").glob(f"{name}_*.jsonl"), key=lambda path: len(read_rows(path))
        )
        yield f"| longest process, {name}: {log.stem} | {_describe_growth(read_rows(log))} |"


def _describe_rows(rows: Sequence[int], step: int) -> str:
    if rows == list(range(step + 1)):
        return f"0 to {step}, each once"
    counts = Counter(rows)
    twice = sorted(number for number, n in counts.items() if n > 1)
    missing = [number for number in range(step + 1) if number not in counts]
    later = sorted(number for number in counts if number > step)
    return f"FAILED: twice {twice}, missing {missing}, later {later}"


def _describe_growth(rows: Sequence[dict[str, Any]]) -> str:
    quarter = max(1, len(rows) // 4)
    early, late = rows[quarter : 2 * quarter] or rows, rows[-quarter - 1 : -1] or rows
    return (
        f"{rows[-1]['seconds']:.0f} s; RSS {median(r['rss_mb'] for r in early):.0f} MB in its second "
        f"quarter, {median(r['rss_mb'] for r in late):.0f} MB in its last; threads "
        f"{median(r['threads'] for r in early):.0f} and {median(r['threads'] for r in late):.0f}"
    )


def _list_learning(folder: Path, step: int, healthy: Sequence[Path]) -> Iterable[str]:
    evaluations = folder / "evaluations"
    yield "\n| training | reward, last quarter of steps | pass@1 before | pass@1 after | change |"
    yield "|---|---|---|---|---|"
    for run in (folder / "faults", *healthy):
        before, after = (
            next(iter(read_reports(evaluations / f"{run.name}_{number}").values())).overall
            for number in (0, step)
        )
        change = compare(evaluations / f"{run.name}_0", evaluations / f"{run.name}_{step}")
        yield (
            f"| {run.name} | {_describe_reward(run, step)} | {_rate(before.success_rate, before.interval)} "
            f"| {_rate(after.success_rate, after.interval)} | {conclude(change.sets[0])} |"
        )
    yield ""
    names = ["faults", *(run.name for run in healthy)]
    for index, one in enumerate(names):
        for other in names[index + 1 :]:
            compared = compare(evaluations / f"{other}_{step}", evaluations / f"{one}_{step}")
            overall = compared.overall
            low, high = overall.interval
            yield (
                f"{one} minus {other} after step {step}: {overall.difference:+.1%}, interval "
                f"{low:+.1%} to {high:+.1%}, p {overall.p_value:.3f}, {overall.verdict.value}."
            )


def _describe_reward(run: Path, step: int) -> str:
    """The mean over tasks of the graded attempts' rewards, with its interval."""
    rates: list[float] = []
    for number in range(step - max(1, step // 4) + 1, step + 1):
        by_task: dict[str, list[float]] = {}
        for episode in read_trajectories(train_path(run / "trajectories", number)):
            if episode.grade is not None:
                by_task.setdefault(episode.task_key, []).append(episode.grade.reward)
        rates += map(fmean, by_task.values())
    return _rate(fmean(rates), mean_rate(rates)) if rates else "no grade"


def _rate(rate: float | None, interval: tuple[float, float]) -> str:
    return f"{rate or 0:.1%} ({interval[0]:.1%} to {interval[1]:.1%})"
