"""What the buckets and Slack must hold after the run of `benchmarks.loopback`."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyfleet.checkpoints.bucket import BucketCheckpoints
from skyfleet.storage.objects import join, list_objects, read_object
from skyfleet.storage.transfer import hash_object
from skyfleet.trajectories.journal_segment import read_segment

TRAIN = "trajectories/train"
ENDING = ".jsonl.gz"


@dataclass(slots=True, kw_only=True)
class Checks:
    failed: list[str] = field(default_factory=list)
    n_held: int = 0

    def check(self, holds: bool, what: str) -> None:
        print(f"  {'ok     ' if holds else 'FAILED '} {what}")
        if holds:
            self.n_held += 1
        else:
            self.failed.append(what)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRun:
    """What machine 1 had written when it was lost."""

    rows: list[str]
    episodes: Mapping[str, str]
    """SHA-256 of the archive of every step."""
    recorded: Mapping[str, Sequence[bytes]]
    """The archive of the step in which the trainer was killed, and the episodes in the journal then."""


def read_recorded(journal: Path) -> list[bytes]:
    """The finished episodes of a step, as the archive will store them."""
    return [record.line for record in read_segment(journal, lambda _: None)]


def read_lost_run(folder: Path, recorded: Mapping[str, Sequence[bytes]]) -> LostRun:
    archives = sorted((folder / TRAIN).glob(f"step_*{ENDING}"))
    return LostRun(
        recorded=recorded,
        rows=(folder / "metrics.jsonl").read_text().splitlines(),
        episodes={path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in archives},
    )


def check_rows(checks: Checks, rows: Sequence[str], lost: LostRun, step: int, last: int) -> None:
    steps = [json.loads(row)["step"] for row in rows]
    checks.check(steps == list(range(last + 1)), f"metrics.jsonl has the steps {steps}, once each")
    checks.check(
        list(rows[: step + 1]) == lost.rows[: step + 1],
        f"rows 0 to {step} are those of machine 1, byte for byte",
    )


def check_checkpoints(
    checks: Checks, bucket: BucketCheckpoints, *, first_step: int, last_step: int
) -> None:
    complete = sorted(bucket.list_complete_steps())
    checks.check(
        {*range(first_step, last_step + 1)} <= {*complete},
        f"complete checkpoints in the bucket: {complete}",
    )
    wrong, n_files = [], 0
    for step in complete:
        manifest = bucket.read_manifest(step)
        assert manifest is not None
        for name, record in manifest.files.items():
            n_files += 1
            found = hash_object(join(bucket.step_address(step), name))
            if (found.sha256, found.size_bytes) != (record.sha256, record.size_bytes):
                wrong.append(f"{step}/{name}")
    checks.check(
        not wrong, f"{n_files} files have the SHA-256 of their manifests {wrong or ''}".rstrip()
    )
    names = [one.name for one in list_objects(bucket.address)]
    checks.check("owner.json" not in names, "owner.json is gone: no process uploads any more")


def check_episodes(
    checks: Checks,
    address: str,
    lost: LostRun,
    *,
    step: int,
    episodes_per_step: int,
    episodes_per_eval: int,
) -> None:
    archives = [one.name for one in list_objects(address) if one.name.endswith(ENDING)]
    places: Counter[tuple[str, str, int]] = Counter()
    sizes: Counter[str] = Counter()
    lines: dict[str, list[bytes]] = {}
    for name in archives:
        lines[name] = gzip.decompress(read_object(join(address, name))).splitlines()
        for line in lines[name]:
            episode = json.loads(line)
            places[name, episode["task_key"], episode["sample"]] += 1
            sizes[name] += 1
    twice = [place for place, count in places.items() if count > 1]
    training = {name: count for name, count in sizes.items() if name.startswith(TRAIN)}
    evaluations = {name: count for name, count in sizes.items() if name not in training}
    checks.check(
        not twice and set(training.values()) == {episodes_per_step},
        f"{sum(training.values())} training episodes of {len(training)} steps, none twice",
    )
    checks.check(
        sorted(evaluations.values()) == [episodes_per_eval] * 2,
        f"{sum(evaluations.values())} episodes of {len(evaluations)} evaluations, none twice",
    )
    for name, recorded in lost.recorded.items():
        checks.check(
            {*recorded} <= {*lines[f"{TRAIN}/{name}"]},
            f"the {len(recorded)} episodes recorded before the kill were trained on as they were",
        )
    kept = [f"step_{number:06d}{ENDING}" for number in range(1, step + 1)]
    same = [
        name
        for name in kept
        if hashlib.sha256(read_object(join(address, TRAIN, name))).hexdigest()
        == lost.episodes.get(name)
    ]
    checks.check(
        same == kept, f"the episodes of steps 1 to {step} are machine 1's: not played again"
    )


def check_dumps(checks: Checks, address: str, steps: Sequence[int], envs: Sequence[str]) -> None:
    expected = sorted(
        f"global_step_{step}/{name}.jsonl"
        for step in steps
        for name in (*envs, "aggregated_results")
    )
    found = sorted(one.name for one in list_objects(address) if one.name.endswith(".jsonl"))
    checks.check(found == expected, f"evaluation dumps: {', '.join(found)}")


def check_thread(
    checks: Checks, posts: Sequence[Mapping[str, Any]], expected: Sequence[str], channel: str
) -> None:
    """The messages in order, all but the first in the thread of the first."""
    titles = [str(post["text"]).splitlines()[0] for post in posts]
    in_order = len(titles) == len(expected) and all(
        part in title for part, title in zip(expected, titles, strict=True)
    )
    checks.check(in_order, f"{len(titles)} messages in order: {'; '.join(expected)}")
    threads = [post.get("thread_ts") for post in posts]
    checks.check(
        threads[:1] == [None] and len(set(threads[1:])) == 1 and None not in threads[1:],
        "one thread: every later message replies to the first, also from machine 2",
    )
    channels = {post["channel"] for post in posts}
    checks.check(channels == {channel}, f"all in {', '.join(map(str, channels))}")


def check_secrets(checks: Checks, addresses: Sequence[str], secrets: Sequence[str]) -> None:
    n_objects, leaks = 0, []
    for address in addresses:
        for one in list_objects(address):
            n_objects += 1
            data = read_object(join(address, one.name))
            data = gzip.decompress(data) if one.name.endswith(".gz") else data
            if any(secret.encode() in data for secret in secrets):
                leaks.append(one.name)
    checks.check(
        not leaks, f"none of {n_objects} objects contains a key or a token {leaks or ''}".rstrip()
    )
