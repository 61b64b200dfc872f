"""Failure classes: precision, recall and the confusion table of the rules on the labelled set.

`python benchmarks/failure_classes.py`; how the set was made is in docs/analysis.md.
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
    """What the scripted agent was made to do; `read` where a person gave the label."""
    held_out: bool
    """Not looked at while the rules were written."""
    episode: Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    pairs: Mapping[tuple[FailureClass, FailureClass], int]
    """How many episodes have this label and were given this class."""

    @property
    def n_episodes(self) -> int:
        return sum(self.pairs.values())

    @property
    def accuracy(self) -> float:
        return sum(n for (label, given), n in self.pairs.items() if label is given) / (
            self.n_episodes
        )

    def precision(self, kind: FailureClass) -> float:
        """Of those given the class, the share that has it; 0 where none was given it."""
        return self._share(kind, of=1)

    def recall(self, kind: FailureClass) -> float:
        """Of those that have the class, the share that was given it; 0 where none has it."""
        return self._share(kind, of=0)

    def f1(self, kind: FailureClass) -> float:
        both = self.precision(kind) + self.recall(kind)
        return 2 * self.precision(kind) * self.recall(kind) / both if both else 0.0

    @property
    def macro_f1(self) -> float:
        """The mean over the classes that have an episode, each as heavy as the other."""
        return fmean(self.f1(kind) for kind in {label for label, _ in self.pairs})

    def _share(self, kind: FailureClass, *, of: int) -> float:
        total = sum(n for pair, n in self.pairs.items() if pair[of] is kind)
        return self.pairs.get((kind, kind), 0) / total if total else 0.0


def score(episodes: Iterable[Labelled]) -> Scores:
    """The rules against the labels; no labelled episode may have passed."""
    pairs: Counter[tuple[FailureClass, FailureClass]] = Counter()
    for one in episodes:
        given = classify(one.episode)
        if given is None:
            raise ValueError(f"{one.episode.task_key} passed, so it has no class; leave it out")
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
    """The same episodes give the same bytes."""
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
