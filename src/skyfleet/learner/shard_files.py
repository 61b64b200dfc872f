"""The training state of a sharded learner: every rank writes its part, and any number of ranks reads it.

A folder holds the files of torch.distributed.checkpoint, with the float32 weights and moments of each
trained parameter by name, and `state.json` with everything else. A single learner reads it too, and
ranks read the file of a single learner.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from skyfleet.errors import CheckpointError
from skyfleet.learner.optimizer import Optimizer
from skyfleet.learner.ranks import Ranks
from skyfleet.learner.state_files import load_state

_STATE = "state.json"


def has_shards(folder: Path) -> bool:
    return (folder / _STATE).is_file()


def save_shards(
    folder: Path, names: Sequence[str], optimizer: Optimizer, ranks: Ranks, state: dict[str, Any]
) -> None:
    """Every rank calls it; `names` are those of the optimizer's parameters, `state` is plain JSON."""
    if ranks.is_first:
        folder.mkdir()
    ranks.wait()
    with warnings.catch_warnings(action="ignore"):  # of torch, about its own storage types
        save(_name_tensors(names, optimizer, ranks), checkpoint_id=str(folder), **ranks.dcp)
    if ranks.is_first:
        described = state | {"steps": optimizer.steps, "n_tensor_ranks": ranks.n_tensor_ranks}
        (folder / _STATE).write_text(json.dumps(described, indent=1))
    ranks.wait()


def read_shards_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / _STATE).read_text())
    return state


def load_shards(folder: Path, names: Sequence[str], optimizer: Optimizer, ranks: Ranks) -> None:
    """Read this rank's part of the weights and moments, however many ranks wrote them."""
    saved = read_shards_state(folder)
    if saved["n_tensor_ranks"] != ranks.n_tensor_ranks:
        raise CheckpointError(
            f"{folder} was written with trainer.policy.tensor_parallel_size="
            f"{saved['n_tensor_ranks']}, and this run has {ranks.n_tensor_ranks}; set it to "
            f"{saved['n_tensor_ranks']}"
        )
    optimizer.reset(saved["steps"])
    try:
        with warnings.catch_warnings(action="ignore"):
            load(_name_tensors(names, optimizer, ranks), checkpoint_id=str(folder), **ranks.dcp)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{folder} cannot be read: {reason}; choose another checkpoint"
        ) from error
    optimizer.finish_loading()


@torch.no_grad()
def load_whole(path: Path, optimizer: Optimizer, ranks: Ranks) -> dict[str, Any]:
    """Read this rank's part of the file of a single learner; returns the rest of it.

    The weights of a policy in float32 are not in that file: they must have been loaded.
    """
    state = load_state(path)
    saved = state.pop("optimizer")
    optimizer.reset(saved["steps"])
    moments, masters = saved["adam"]["state"], saved["masters"]
    for index, name, tensor in optimizer.list_tensors():
        if name == "weight":
            if masters:
                ranks.keep_part(optimizer.parameters[index], tensor, masters[index])
        elif index in moments:
            ranks.keep_part(optimizer.parameters[index], tensor, moments[index][name])
    optimizer.finish_loading()
    return state


def _name_tensors(names: Sequence[str], optimizer: Optimizer, ranks: Ranks) -> dict[str, Tensor]:
    return {
        ranks.shard_key(f"{names[index]}.{kind}"): ranks.as_shard(
            optimizer.parameters[index], tensor.detach()
        )
        for index, kind, tensor in optimizer.list_tensors()
    }
