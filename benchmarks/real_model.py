"""SmolLM2-135M on held-out tasks: as published, after the warm start, and after GRPO.

Runs `skyfleet evaluate` on the published model, then `skyfleet train`, and prints the three scores
on unseen tasks, unseen templates and an unseen world, with intervals and a paired verdict on GRPO.
The sets and the recipe come from the configuration; this script does not select a step.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from skyfleet.config.loading import load_config
from skyfleet.evaluation.compare import compare
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.score import EnvScore
from skyfleet.evaluation.table import comparison_table


def run_skyfleet(*args: str) -> float:
    start = perf_counter()
    subprocess.run([sys.executable, "-m", "skyfleet.cli.main", *args], check=True)
    return perf_counter() - start


def load_reports(folder: Path, step: int) -> dict[str, EvalReport]:
    files = sorted((folder / "reports" / f"step_{step:06d}").glob("*.json"))
    return {file.stem: EvalReport.from_json(file.read_text()) for file in files}


def format_score(score: EnvScore) -> str:
    low, high = score.interval
    rate = score.success_rate or 0.0
    return f"{100 * rate:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def format_rows(stages: Sequence[dict[str, EvalReport]]) -> list[str]:
    lines = [
        "| set | environment | tasks | before | after warm start | after GRPO |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for name in stages[0]:
        reports = [stage[name] for stage in stages]
        for env_key in sorted(reports[0].by_env):
            scores = [report.by_env[env_key] for report in reports]
            cells = [name, env_key, str(scores[0].n_tasks), *map(format_score, scores)]
            lines.append(f"| {' | '.join(cells)} |")
        overall = [report.overall for report in reports]
        cells = [name, "**all**", str(overall[0].n_tasks), *map(format_score, overall)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="smollm2_h200")
    parser.add_argument("--base", type=Path, default=Path("runs/smollm2_base"))
    parser.add_argument("overrides", nargs="*", help="key=value, for both commands")
    options = parser.parse_args()
    args = [options.config, *options.overrides]
    base_seconds = run_skyfleet("evaluate", *args, "--output", str(options.base))
    train_seconds = run_skyfleet("train", *args)
    config = load_config(Path(options.config).read_text(), options.overrides)
    run = Path(config.trainer.run_path)
    last = max(
        int(folder.name.removeprefix("step_")) for folder in (run / "reports").glob("step_*")
    )
    before, warm, after = (
        load_reports(options.base, 0),
        load_reports(run, 0),
        load_reports(run, last),
    )
    print(f"\nevaluated in {base_seconds:.0f} s, trained in {train_seconds:.0f} s; pass@1 in %\n")
    print(*format_rows([before, warm, after]), sep="\n")
    print("\nGRPO compared with the warm start, paired by task:\n")
    print(comparison_table([compare(warm[name], after[name]) for name in warm]))


if __name__ == "__main__":
    main()
