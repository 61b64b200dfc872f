"""Attach the inputs and results of a run to the trackers that keep files."""

from __future__ import annotations

import logging
from pathlib import Path

from skyfleet.config.keys import dump_yaml
from skyfleet.config.root import RunConfig
from skyfleet.errors import SkyfleetError
from skyfleet.storage.store import read_bytes, sibling_address
from skyfleet.tasks.manifest import MANIFEST
from skyfleet.tasks.sources import is_file
from skyfleet.tracking.step_log import StepLog
from skyfleet.trainer.bucket_layout import REPORT

logger = logging.getLogger(__name__)

RESULTS = "results.md"


def attach_inputs(log: StepLog, config: RunConfig) -> None:
    """The configuration, and the manifest of each dataset that has one."""
    if not log.stores_files:
        return
    log.attach("run_config.yaml", dump_yaml(config))  # W&B has a config.yaml of its own
    data = config.data
    sources = [*data.train_data, *(s for part in data.eval_sets.values() for s in part)]
    addresses = dict.fromkeys(
        sibling_address(source, MANIFEST) for source in sources if is_file(source)
    )
    number = 0
    for address in addresses:
        if text := _read_manifest(address):
            number += 1
            log.attach(f"dataset_manifest{'' if number == 1 else f'_{number}'}.json", text)


def attach_results(log: StepLog, folder: Path) -> None:
    """The verdict table and the report."""
    if not log.stores_files:
        return
    for name in (RESULTS, REPORT):
        path = folder / name
        if path.is_file():
            log.attach(name, path.read_text(encoding="utf-8", errors="replace"))


def _read_manifest(address: str) -> str | None:
    try:
        return read_bytes(address).decode("utf-8", "replace")
    except FileNotFoundError:
        return None  # data.allow_unmanifested
    except (OSError, SkyfleetError) as error:
        logger.warning("%s is not attached: %s", address, error)
        return None
