"""Precision, recall and confusion table of the failure classes on the labelled set.

Run `python benchmarks/failure_classes.py`; docs/analysis.md describes the set.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from skyfleet.analysis.failure_class import FailureClass
from skyfleet.analysis.failures import classify
from skyfleet.analysis.formatting import table
from skyfleet.trajectories.records import from_record, to_record
from skyfleet.trajectories.trajectory import Trajectory

FOLDER = Path(__file__).parents[1] / "tests" / "assets" / "labelled_episodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    label: FailureClass
    mistake: str
    """What the scripted agent does wrong; starts with `read` if a person gave the label."""
    held_out: bool
    """Not used while the rules were written."""
    episode: Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    pairs: Mapping[tuple[FailureClass, FailureClass], int]
    """The number of episodes per label and assigned class."""

    @property
    def n_episodes(self) -> int:
        return sum(self.pairs.values())

    @property
    def accuracy(self) -> float:
        return sum(n for (label, given), n in self.pairs.items() if label is given) / (
            self.n_episodes
        )

    def precision(self, kind: FailureClass) -> float:
        """The share of correct assignments to the class; 0 if there are none."""
        return self._share(kind, of=1)

    def recall(self, kind: FailureClass) -> float:
        """The share of the class that is recognised; 0 if it has no episode."""
        return self._share(kind, of=0)

    def f1(self, kind: FailureClass) -> float:
        both = self.precision(kind) + self.recall(kind)
        return 2 * self.precision(kind) * self.recall(kind) / both if both else 0.0

    @property
    def macro_f1(self) -> float:
        """The unweighted mean over the classes with an episode."""
        return fmean(self.f1(kind) for kind in {label for label, _ in self.pairs})

    def _share(self, kind: FailureClass, *, of: int) -> float:
        total = sum(n for pair, n in self.pairs.items() if pair[of] is kind)
        return self.pairs.get((kind, kind), 0) / total if total else 0.0


def score(episodes: Iterable[Labelled]) -> Scores:
    """Compare the rules with the labels; raises if a labelled episode passed."""
    pairs: Counter[tuple[FailureClass, FailureClass]] = Counter()
    for one in episodes:
        given = classify(one.episode)
        if given is None:
            raise ValueError(
                f"{one.episode.task_key} passed, so it has no class; remove it from the set"
            )
        pairs[one.label, given] += 1
    return Scores(pairs=pairs)


def read_labelled(path: Path) -> list[Labelled]:
    with gzip.open(path, "rt", encoding="ascii") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        Labelled(
            label=FailureClass(row["label"]),
            mistake=row["mistake"],
            held_out=row["held_out"],
            episode=from_record(row["episode"]),
        )
        for row in rows
    ]


def write_labelled(path: Path, episodes: Iterable[Labelled]) -> None:
    """Deterministic: the same episodes give the same bytes."""
    rows = (
        {
            "label": one.label.value,
            "mistake": one.mistake,
            "held_out": one.held_out,
            "episode": to_record(one.episode),
        }
        for one in episodes
    )
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode("ascii"), mtime=0))


def main() -> None:
    paths = sorted(FOLDER.glob("*.jsonl.gz"))
    episodes = [one for path in paths for one in read_labelled(path)]
    parts: dict[str, Sequence[Labelled]] = {
        "used while writing the rules": [one for one in episodes if not one.held_out],
        "held out": [one for one in episodes if one.held_out],
    }
    for name, part in parts.items():
        scores = score(part)
        print(
            f"{name}: {scores.n_episodes} episodes, "
            f"accuracy {scores.accuracy:.3f}, macro F1 {scores.macro_f1:.3f}\n"
        )
        print(f"{_class_table(scores)}\n")
    print("Held-out part; rows are labels, columns are assigned classes.\n")
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
    """Columns are numbered like the rows, because twelve names do not fit a screen."""
    numbers = [str(n) for n, _ in enumerate(FailureClass, start=1)]
    rows = [
        (number, label.value, *(str(scores.pairs.get((label, given), 0)) for given in FailureClass))
        for number, label in zip(numbers, FailureClass, strict=True)
    ]
    return table(("", "label", *numbers), rows)


if __name__ == "__main__":
    main()
