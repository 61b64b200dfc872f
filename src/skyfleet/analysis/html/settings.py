"""Settings: how the runs were configured, and what their data was made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skyfleet.analysis.html.blocks import columns, fold, note, section, table
from skyfleet.analysis.html.markup import Html, join, tag
from skyfleet.analysis.html.shown_run import ShownRun
from skyfleet.analysis.html.wording import count, written
from skyfleet.config.explain import as_yaml, diff, flatten
from skyfleet.config.root import RunConfig
from skyfleet.errors import TaskError
from skyfleet.storage.store import beside, is_remote
from skyfleet.tasks.manifest import MANIFEST, Manifest, read_manifest

_MADE = ("world:", "agentdojo:")
_HASH_LETTERS = 12


def settings_section(runs: Sequence[ShownRun]) -> Html:
    recorded = [run for run in runs if not run.folder.imported]
    return section(
        "settings",
        "Configuration and data",
        _between(recorded) if len(recorded) > 1 else None,
        [_of_run(run) for run in recorded],
        [
            note(f"{run.title}: not recorded, it was imported.")
            for run in runs
            if run not in recorded
        ],
    )


def _between(runs: Sequence[ShownRun]) -> Html:
    flat = [flatten(run.folder.config) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [
        (key, *(written(one.get(key)) for one in flat))
        for key in keys
        if any(one.get(key) != flat[0].get(key) for one in flat)
    ]
    if not rows:
        return note("The runs have the same configuration.")
    names = [run.title for run in runs]
    return table("Where the runs differ", columns("Key", *names, value=("Key", *names)), rows)


def _of_run(run: ShownRun) -> Html:
    config = run.folder.config
    changed = diff(RunConfig(), config)
    rows = [(key, written(ours), written(default)) for key, (default, ours) in changed.items()]
    head = columns("Key", "This run", "Default", value=("Key", "This run", "Default"))
    differences = table(f"{run.title}: what is not the default", head, rows)
    return join(
        fold(f"{run.title}: {len(rows)} keys that are not the default", differences),
        fold(f"{run.title}: every key", tag("pre", as_yaml(config), tabindex="0")),
        fold(f"{run.title}: data", list(_data(config))),
    )


def _data(config: RunConfig) -> Iterator[Html]:
    """What is known of each training source, without asking another machine."""
    if not config.data.train_data:
        yield note("data.train_data is empty.")
    for source in config.data.train_data:
        if source.startswith(_MADE):
            yield note(tag("code", source), " is made from its address and has no manifest.")
        elif is_remote(source):
            yield note(tag("code", source), " is on another machine; its manifest was not read.")
        else:
            yield _manifest_of(source)


def _manifest_of(source: str) -> Html:
    try:
        manifest = read_manifest(beside(source, MANIFEST))
    except (OSError, TaskError):
        return note(tag("code", source), f" has no {MANIFEST} that can be read from here.")
    head = columns("Environment", "Train", "Validation", text=("Environment",))
    rows = [
        (env_key, count(sides.get("train", 0)), count(sides.get("validation", 0)))
        for env_key, sides in manifest.counts.items()
    ]
    return join(table(f"Tasks beside {source}", head, rows), note(_origin(manifest)))


def _origin(manifest: Manifest) -> str:
    dropped = ", ".join(f"{n} {reason}" for reason, n in manifest.dropped.items()) or "none"
    files = ", ".join(f"{name} {sha[:_HASH_LETTERS]}" for name, sha in manifest.files.items())
    return (
        f"From {manifest.source} ({manifest.source_sha256[:_HASH_LETTERS]}), split by "
        f"{manifest.split_by}, skyfleet {manifest.skyfleet_version}. Rows left out: {dropped}. "
        f"Files: {files}."
    )
