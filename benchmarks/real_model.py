"""A real language model learns: SmolLM2-135M before the warm start, after it, and after GRPO.

Runs `skyfleet evaluate` on the model as it was published, then `skyfleet train`, and puts the three
side by side on unseen tasks, templates and an unseen world, with intervals and a paired verdict of
what reinforcement added. The sets and the recipe are the configuration's; nothing here picks a step.
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


def skyfleet(*words: str) -> float:
    start = perf_counter()
    subprocess.run([sys.executable, "-m", "skyfleet.cli.main", *words], check=True)
    return perf_counter() - start


def reports_of(folder: Path, step: int) -> dict[str, EvalReport]:
    files = sorted((folder / "reports" / f"step_{step:06d}").glob("*.json"))
    return {file.stem: EvalReport.from_json(file.read_text()) for file in files}


def cell(score: EnvScore) -> str:
    low, high = score.interval
    rate = score.success_rate or 0.0
    return f"{100 * rate:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def rows(stages: Sequence[dict[str, EvalReport]]) -> list[str]:
    lines = [
        "| set | environment | tasks | before | after warm start | after GRPO |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for name in stages[0]:
        reports = [stage[name] for stage in stages]
        for env_key in sorted(reports[0].by_env):
            scores = [report.by_env[env_key] for report in reports]
            cells = [name, env_key, str(scores[0].n_tasks), *map(cell, scores)]
            lines.append(f"| {' | '.join(cells)} |")
        overall = [report.overall for report in reports]
        cells = [name, "**all**", str(overall[0].n_tasks), *map(cell, overall)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/smollm2_135m_h200.yaml")
    parser.add_argument("--base", type=Path, default=Path("runs/smollm2_base"))
    parser.add_argument("overrides", nargs="*", help="key=value, for both commands")
    options = parser.parse_args()
    words = [options.config, *options.overrides]
    base_seconds = skyfleet("evaluate", *words, "--output", str(options.base))
    train_seconds = skyfleet("train", *words)
    config = load_config(Path(options.config).read_text(), options.overrides)
    run = Path(config.trainer.run_path)
    last = max(
        int(folder.name.removeprefix("step_")) for folder in (run / "reports").glob("step_*")
    )
    before, warm, after = reports_of(options.base, 0), reports_of(run, 0), reports_of(run, last)
    print(f"\nevaluated in {base_seconds:.0f} s, trained in {train_seconds:.0f} s; pass@1 in %\n")
    print(*rows([before, warm, after]), sep="\n")
    print("\nWhat GRPO added to the warm start, paired by task:\n")
    print(comparison_table([compare(warm[name], after[name]) for name in warm]))


if __name__ == "__main__":
    main()
