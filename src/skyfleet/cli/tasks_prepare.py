"""`skyfleet tasks prepare`: split raw rows into a dataset with a manifest."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from skyfleet.analysis.formatting import table
from skyfleet.cli.arguments import DryRun
from skyfleet.errors import ConfigError
from skyfleet.terminal import print

if TYPE_CHECKING:
    from skyfleet.tasks.manifest import Manifest
    from skyfleet.tasks.prepare import PreparedDataset, PrepareOptions
    from skyfleet.tasks.raw_rows import RawRows

Modality = Literal["tool_use", "computer_use", "browser_use", "all", "both"]
Names = Annotated[str, typer.Option(help="Comma-separated; empty means all.")]


def prepare_command(
    tasks_json: Annotated[str, typer.Option(help="Rows: .json, .jsonl or .parquet; s3:// too.")],
    output_dir: Annotated[str, typer.Option(help="A folder of its own, or s3://.")] = "data/fleet",
    modality: Annotated[
        Modality,
        typer.Option(
            help="all takes every row; both writes two datasets, with {modality} in --output-dir and, "
            "if there are two sources, in --tasks-json."
        ),
    ] = "tool_use",
    eval_ratio: Annotated[float, typer.Option(min=0, max=1, help="Of each env.")] = 0.02,
    env_filter: Names = "",
    difficulty_filter: Names = "",
    max_tasks: Annotated[int | None, typer.Option(min=1, help="Use only the first N.")] = None,
    max_env_ratio: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Maximum share of one environment in training."),
    ] = None,
    max_eval_prompts: Annotated[int | None, typer.Option(min=1)] = None,
    max_eval_per_env: Annotated[
        int | None, typer.Option(min=1, help="Evaluation tasks of one environment; Fleet's is 20.")
    ] = None,
    held_out: Annotated[
        str, typer.Option(help="Environments only evaluated on.")
    ] = "outlook,instacart",
    quarantine: Annotated[
        str | None,
        typer.Option(help="Rows to exclude; by default quarantine.jsonl beside them or here."),
    ] = None,
    earlier: Annotated[
        str | None,
        typer.Option(help="Manifest to compare with; by default the one in --output-dir."),
    ] = None,
    keep_sides: Annotated[
        bool, typer.Option("--keep-sides", help="Split with the earlier manifest's thresholds.")
    ] = False,
    data_version: Annotated[
        str,
        typer.Option(
            help="The dataset's version in its manifest; by default the vN folder of the source, or "
            "a part of its hash."
        ),
    ] = "",
    dry_run: DryRun = False,
) -> None:
    """Split raw tasks into train.parquet and validation.parquet, with a manifest."""
    from skyfleet.tasks.prepare import PrepareOptions
    from skyfleet.tasks.raw_rows import read_both_modalities, read_raw_rows
    from skyfleet.tasks.splits import SplitRule

    version, names = _check_version(data_version), _names(env_filter)
    difficulties = _difficulties(difficulty_filter)
    if modality == "both":
        parts = read_both_modalities(tasks_json, output_dir, names)
    else:
        chosen = None if modality == "all" else modality
        parts = [read_raw_rows(chosen, tasks_json, output_dir, names)]
    for part in parts:
        if names and not part.env_filter:
            print(f"left out {part.modality}: it has no task of {', '.join(names)}")
            continue
        before = _earlier_manifest(earlier, part.folder, needed=keep_sides)
        options = PrepareOptions(
            modality=part.modality,
            env_filter=part.env_filter,
            difficulty_filter=difficulties,
            max_tasks=max_tasks,
            split=SplitRule(
                eval_fraction=eval_ratio,
                held_out_envs=frozenset(_names(held_out)),
                max_eval_tasks=max_eval_per_env,
                thresholds=before.thresholds if before and keep_sides else {},
            ),
            max_env_ratio=max_env_ratio,
            max_eval_prompts=max_eval_prompts,
        )
        _prepare_part(
            part,
            options,
            before,
            quarantine,
            keep_sides=keep_sides,
            data_version=version,
            dry_run=dry_run,
        )


def _prepare_part(
    part: RawRows,
    options: PrepareOptions,
    before: Manifest | None,
    quarantine: str | None,
    *,
    keep_sides: bool,
    data_version: str | None,
    dry_run: bool,
) -> None:
    from skyfleet.curation.quarantine import find_quarantine
    from skyfleet.tasks.manifest import sha256_hex
    from skyfleet.tasks.prepare import explain_no_validation, prepare
    from skyfleet.tasks.publish import publish

    excluded = find_quarantine([part.source], quarantine)
    prepared = prepare(part.rows, options, in_quarantine=lambda task: task in excluded)
    print(f"quarantine: {', '.join(excluded.files) or 'none'}")
    if note := explain_no_validation(prepared, options.split):
        print(note)
    if dry_run:
        _print_counts(prepared)
        print(f"would write {part.folder}")
        return
    manifest, files = _manifest(
        prepared,
        _describe_options(options, excluded.files),
        before,
        source=part.source,
        source_sha256=sha256_hex(part.data),
        keep_sides=keep_sides,
        data_version=data_version,
    )
    publish(part.folder, files, manifest)
    _print_counts(prepared)
    _print_manifest(manifest)
    print(f"wrote {part.folder}: {', '.join([*files, 'manifest.json'])}")


def _manifest(
    prepared: PreparedDataset,
    options: dict[str, Any],
    before: Manifest | None,
    *,
    source: str,
    source_sha256: str,
    keep_sides: bool,
    data_version: str | None,
) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest and the files it lists."""
    from skyfleet.tasks.manifest import make_manifest
    from skyfleet.tasks.publish import dataset_files

    files = dataset_files(prepared)
    manifest = make_manifest(
        prepared,
        files,
        source=source,
        source_sha256=source_sha256,
        options=options,
        split_by="earlier thresholds" if keep_sides else "ratio",
        earlier=before,
        data_version=data_version,
    )
    return manifest, files


def _check_version(name: str) -> str | None:
    if name and not re.fullmatch(r"[\w.+-]+", name):
        raise ConfigError(
            f"--data-version {name!r}: use letters, digits, _, ., + and -, as in v0.2"
        )
    return name or None


def _print_manifest(manifest: Manifest) -> None:
    print(f"dataset version: {manifest.data_version}")
    prompts = manifest.unique_prompts
    print(f"unique prompts: train {prompts['train']}, validation {prompts['validation']}")
    if manifest.moved:
        keys = ", ".join(list(manifest.moved)[:3])
        print(f"moved since the earlier manifest: {len(manifest.moved)} ({keys}, ...)")


def _print_counts(prepared: PreparedDataset) -> None:
    sides = (prepared.train, prepared.validation)
    by_side = [Counter(task.env_key for task in side) for side in sides]
    counts = {env: [side[env] for side in by_side] for env in sorted(set().union(*by_side))}
    counts["all"] = [len(side) for side in sides]
    rows = [(env, *map(str, pair), str(sum(pair))) for env, pair in counts.items()]
    print(table(("environment", "train", "validation", "total"), rows))
    env, n_tasks = by_side[0].most_common(1)[0]
    print(f"largest share of training: {env}, {n_tasks / len(prepared.train):.0%}")
    unverified = [
        task for side in sides for task in side if task.verifier_code and not task.solution
    ]
    if unverified:
        print(f"unverified, no reference solution: {len(unverified)}, such as {unverified[0].key}")
    for reason in sorted(set(prepared.dropped.values())):
        dropped = [row for row, why in prepared.dropped.items() if why == reason]
        more = ", ..." if len(dropped) > 3 else ""
        print(f"excluded, {reason}: {len(dropped)}: {', '.join(dropped[:3])}{more}")


def _describe_options(options: PrepareOptions, quarantine: dict[str, str]) -> dict[str, Any]:
    """`quarantine` maps each quarantine file used to its sha256."""
    cap = options.split.max_eval_tasks
    return {
        "modality": options.modality or "all",
        "eval_ratio": options.split.eval_fraction,
        "min_eval_tasks": options.split.min_eval_tasks,
        "env_filter": list(options.env_filter),
        "difficulty_filter": list(options.difficulty_filter),
        "max_tasks": options.max_tasks,
        "max_env_ratio": options.max_env_ratio,
        "max_eval_prompts": options.max_eval_prompts,
        "held_out": sorted(options.split.held_out_envs),
        "quarantine": quarantine,
        # Only if it is set: the manifest of a dataset without it keeps its bytes.
        **({} if cap is None else {"max_eval_per_env": cap}),
    }


def _earlier_manifest(earlier: str | None, folder: str, *, needed: bool) -> Manifest | None:
    from skyfleet.tasks.manifest import MANIFEST, read_manifest

    try:
        return read_manifest(earlier or f"{folder.rstrip('/')}/{MANIFEST}")
    except FileNotFoundError:
        if earlier or needed:
            raise ConfigError(
                f"{earlier or folder} holds no earlier manifest; pass one with --earlier, "
                "or remove --keep-sides"
            ) from None
    return None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _difficulties(text: str) -> tuple[int, ...]:
    for name in _names(text):
        if not name.isdecimal():
            raise ConfigError(f"--difficulty-filter {text!r}: {name!r}; write numbers, such as 1,2")
    return tuple(int(name) for name in _names(text))
