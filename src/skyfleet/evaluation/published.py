"""Published rates: what a table of percentages supports when nothing else is known of it.

Which task passed before and after is not told, so the two columns are compared as unrelated
samples: Fisher's exact test and Newcombe's interval.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from skyfleet.errors import ConfigError
from skyfleet.evaluation.compare import Change, Comparison, corrected
from skyfleet.metrics.intervals import newcombe
from skyfleet.metrics.significance import detectable_difference, fisher_exact, tasks_needed

SUFFIXES = (".yaml", ".yml", ".csv")


def _without_sign(printed: str) -> str:
    return printed.strip().removesuffix("%").rstrip() if isinstance(printed, str) else printed


# Decimal, because 70.0 says more than 70 does.
Percent = Annotated[Decimal, BeforeValidator(_without_sign), Field(ge=0, le=100)]


class _Row(BaseModel):
    """One environment: `n` tasks, and the percentage that passed, as printed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: str = Field(min_length=1)
    n: int = Field(ge=1)
    before_percent: Percent
    after_percent: Percent


_ROWS = TypeAdapter(list[_Row])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    n: int
    before: int
    after: int


def read_published(path: Path) -> Comparison:
    """A list of {env, n, before_percent, after_percent}, in YAML or CSV; their sum is `all`."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            # BaseLoader leaves numbers as they are printed.
            read: object = (
                list(csv.DictReader(file))
                if path.suffix == ".csv"
                else yaml.load(file, Loader=yaml.BaseLoader)
            )
            rows = _ROWS.validate_python(read)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "table"
            raise ConfigError(
                f"{path}: {where}: {first['msg']}; write rows of env, n, before_percent and "
                "after_percent"
            ) from None
        except (yaml.YAMLError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{path} is no table: {' '.join(str(error).split())}") from None
    return compare_published(
        path.stem, {row.env: _counts(path, row) for row in _distinct(path, rows)}
    )


def compare_published(name: str, counts: dict[str, _Counts]) -> Comparison:
    everything = _Counts(
        n=sum(one.n for one in counts.values()),
        before=sum(one.before for one in counts.values()),
        after=sum(one.after for one in counts.values()),
    )
    return Comparison(
        name=name,
        step_before=None,
        step_after=None,
        overall=_change(everything),
        by_env=corrected({env_key: _change(one) for env_key, one in counts.items()}),
    )


def _distinct(path: Path, rows: Sequence[_Row]) -> Sequence[_Row]:
    names = [row.env for row in rows]
    if not names:
        raise ConfigError(f"{path} has no row; write env, n, before_percent and after_percent")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{path}: env {twice[0]!r} is there twice; give each its own row")
    return rows


def _counts(path: Path, row: _Row) -> _Counts:
    return _Counts(
        n=row.n,
        before=_passed(path, row, row.before_percent),
        after=_passed(path, row, row.after_percent),
    )


def _passed(path: Path, row: _Row, percent: Decimal) -> int:
    """The whole number of passes that is printed as `percent`, however its last digit is rounded."""
    passed = round(row.n * percent / 100)
    exponent = percent.as_tuple().exponent
    digit = Decimal(10) ** min(0, exponent if isinstance(exponent, int) else 0)
    exact = Decimal(100 * passed) / row.n
    if abs(exact - percent) > digit / 2:
        raise ConfigError(
            f"{path}: {row.env}: {percent} % of n={row.n} is no whole number of passes; "
            f"{passed} would be {exact:.1f} %; correct one of the two"
        )
    return passed


def _change(counts: _Counts) -> Change:
    n = counts.n
    before, after = counts.before / n, counts.after / n
    difference = after - before
    # The share of tasks whose result would differ between two unrelated samples.
    discordance = before * (1 - after) + after * (1 - before)
    p_value = fisher_exact(counts.before, counts.after, n)
    return Change(
        n_tasks=n,
        n_left_out=0,
        before=before,
        after=after,
        difference=difference,
        interval=newcombe(before, after, n),
        p_value=p_value,
        corrected_p_value=p_value,
        detectable=detectable_difference(n, discordance),
        tasks_needed=tasks_needed(difference, discordance) if difference else None,
    )
