"""Failure classes: precision, recall and the confusion table of the rules on the labelled set.

`python benchmarks/failure_classes.py`; how the set was made is in docs/analysis.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from skyfleet.analysis.failure_class import FailureClass
from skyfleet.analysis.failure_scores import Labelled, Scores, read_labelled, score
from skyfleet.analysis.wording import table

FOLDER = Path(__file__).parents[1] / "tests" / "assets" / "labelled_episodes"


def main() -> None:
    paths = sorted(FOLDER.glob("*.jsonl.gz"))
    episodes = [one for path in paths for one in read_labelled(path)]
    parts: dict[str, Sequence[Labelled]] = {
        "seen while the rules were written": [one for one in episodes if not one.held_out],
        "held out": [one for one in episodes if one.held_out],
    }
    for name, part in parts.items():
        scores = score(part)
        print(
            f"{name}: {scores.n_episodes} episodes, "
            f"accuracy {scores.accuracy:.3f}, macro F1 {scores.macro_f1:.3f}\n"
        )
        print(f"{_class_table(scores)}\n")
    print("Rows are labels, columns what the rules say, of the part held out.\n")
    print(_confusion_table(score(parts["held out"])))


def _class_table(scores: Scores) -> str:
    rows = [
        (
            kind.value,
            str(sum(n for (label, _), n in scores.pairs.items() if label is kind)),
            f"{scores.precision(kind):.2f}",
            f"{scores.recall(kind):.2f}",
            f"{scores.f1(kind):.2f}",
        )
        for kind in FailureClass
    ]
    return table(("class", "episodes", "precision", "recall", "F1"), rows)


def _confusion_table(scores: Scores) -> str:
    """Columns are numbered like the rows: twelve names side by side fit no screen."""
    numbers = [str(n) for n, _ in enumerate(FailureClass, start=1)]
    rows = [
        (number, label.value, *(str(scores.pairs.get((label, given), 0)) for given in FailureClass))
        for number, label in zip(numbers, FailureClass, strict=True)
    ]
    return table(("", "label", *numbers), rows)


if __name__ == "__main__":
    main()
