"""Download what a run that goes on elsewhere lacks: episodes, reports and dumps of its earlier steps."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from skyfleet.analysis.missing_episodes import find_missing_episodes
from skyfleet.analysis.run_folder import open_run
from skyfleet.config.root import RunConfig
from skyfleet.errors import SkyfleetError
from skyfleet.storage.local import make_folder, sync_file
from skyfleet.storage.objects import join, list_objects
from skyfleet.storage.store import read_bucket
from skyfleet.storage.transfer import download_file
from skyfleet.trajectories.archive import SUFFIX

logger = logging.getLogger(__name__)

_STEP_OF = {
    "runs": re.compile(r"(?:trajectories|reports)/(?:[^/]+/)*step_(\d+)[./].*"),
    "evals": re.compile(r"global_step_(\d+)/.*\.jsonl"),
    "training": re.compile(r"global_step_(\d+)\.jsonl"),
}
"""Of the name of an object below the run, by the part of the layout."""
_AT_ONCE = 8


def download_episodes(
    config: RunConfig, last_step: int, on_progress: Callable[[str], None] = lambda _: None
) -> None:
    """Copy what the folder lacks of the steps up to `last_step` from `trainer.trajectory_bucket`.

    A bucket that does not answer is logged: the run can go on without, and says what it lacks.
    """
    trainer = config.trainer
    if trainer.trajectory_bucket is None:
        return
    try:
        missing = find_missing_episodes(open_run(trainer.run_path))
        if missing is None:
            return
        on_progress(f"downloading the episodes of earlier steps from {missing.source}")
        wanted = list(_list_wanted(config, last_step))
        episodes = [one for one in wanted if one[0].endswith(SUFFIX)]
        others = [one for one in wanted if not one[0].endswith(SUFFIX)]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="download") as pool:
            for part in (episodes, others):  # an index without its file is invalid
                list(pool.map(lambda one: _copy(*one), part))
    except (OSError, SkyfleetError) as error:
        logger.warning("episodes of earlier steps were not downloaded: %s", error)


def _list_wanted(config: RunConfig, last_step: int) -> Iterator[tuple[str, Path]]:
    """Addresses, and the files that they become, of what is not here."""
    trainer = config.trainer
    bucket = read_bucket(str(trainer.trajectory_bucket))
    for kind, pattern in _STEP_OF.items():
        base = join(bucket, kind, trainer.run_name)
        for info in list_objects(base):
            match = pattern.fullmatch(info.name)
            if match is None or int(match[1]) > last_step:
                continue
            path = _find_path(kind, info.name, Path(trainer.run_path), Path(trainer.export_path))
            if ".." not in PurePosixPath(info.name).parts and not path.exists():
                yield join(base, info.name), path


def _find_path(kind: str, name: str, folder: Path, exports: Path) -> Path:
    """Where the run wrote it: the reverse of `TrajectoryUploads`."""
    if kind == "runs":
        return folder / name
    if kind == "training":
        return exports / "dumped_training_trajectories" / name
    step, _, rest = name.partition("/")
    return exports / "dumped_evals" / f"{step}_evals" / rest


def _copy(address: str, path: Path) -> None:
    make_folder(path.parent)
    draft = path.with_name(f".{path.name}.draft")
    download_file(address, draft)
    sync_file(draft)
    draft.replace(path)
