"""Plan presets, run them, and print how far the plans were off: the tables of docs/preflight.md.

    python benchmarks/plan_reality.py tiny trainer.max_training_steps=12 trainer.eval_interval=12
    python benchmarks/plan_reality.py smollm2_h200        # on an H200, about ten minutes

Runs `skyfleet plan` and `skyfleet train` one after the other, each in a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from skyfleet.analysis.plan_comparison import compare_plan
from skyfleet.analysis.run_folder import open_run

SKYFLEET = (sys.executable, "-m", "skyfleet.cli.main")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", help="a preset or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=4, help="of the plan")
    parser.add_argument("--folder", type=Path, help="of the run; by default a temporary one")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.folder or Path(scratch) / "run"
        arguments = [chosen.config, *chosen.overrides, f"trainer.run_path={folder}"]
        for command in (["plan", *arguments, "--steps", str(chosen.steps)], ["train", *arguments]):
            subprocess.run([*SKYFLEET, *command], check=True)
        compared = compare_plan(open_run(folder))
        sys.stdout.write(
            f"\n{chosen.config} {' '.join(chosen.overrides)} on {compared.plan.machine}\n\n"
            f"{compared.to_text()}\n"
        )


if __name__ == "__main__":
    main()
