"""The format of weight deltas: XOR of bit patterns, compressed, in safetensors with a manifest.

    SYNC_DIR/full-00000000/…             every weight: the start of a chain
    SYNC_DIR/delta-00000001/…            what changed since the version before
        part-0000.safetensors            a compressed payload per weight
        manifest.json                    sizes, hashes and checksums; written last

A version is complete when its manifest exists. A full snapshot is the XOR with zeros.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from skyfleet.models.weights import INT_DTYPES

MANIFEST = "manifest.json"
FORMAT = 1
CODEC = "zstd"
_LEVEL = 1

Kind = Literal["full", "delta"]


class FileRecord(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str
    size_bytes: int
    sha256: str


class WeightRecord(BaseModel):
    model_config = ConfigDict(frozen=True)

    dtype: str
    shape: tuple[int, ...]
    checksum: tuple[int, ...]
    """Of the whole weight in this version."""
    file: int | None = None
    """Index in `files`; None if the weight has not changed."""
    same_as: str | None = None
    """Another name of the same weight, as for a tied head."""


class Manifest(BaseModel):
    model_config = ConfigDict(frozen=True)

    format: int = FORMAT
    codec: str = CODEC
    chain: str
    """Random: versions of another chain do not continue this one, even if their numbers do."""
    kind: Kind
    version: int
    base_version: int | None
    """The version that a delta changes; None for a full snapshot."""
    files: tuple[FileRecord, ...]
    weights: dict[str, WeightRecord]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def folder_name(kind: Kind, version: int) -> str:
    return f"{kind}-{version:08d}"


def parse_folder_name(name: str) -> tuple[Kind, int] | None:
    kind, _, number = name.partition("-")
    if kind not in ("full", "delta") or not number.isdigit():
        return None
    return ("full" if kind == "full" else "delta"), int(number)


def as_bits(weight: Tensor) -> Tensor:
    """A contiguous weight of the host as a row of integers of its width."""
    return weight.view(INT_DTYPES[weight.element_size()]).reshape(-1)


def compress(bits: Tensor) -> Tensor:
    """Bytes of equal significance are put together: in the high ones of a delta nearly all are 0."""
    bytes_WN = bits.view(torch.uint8).view(-1, bits.element_size()).T.contiguous()
    packed = pa.Codec(CODEC, compression_level=_LEVEL).compress(
        pa.py_buffer(bytes_WN.numpy()), asbytes=False
    )
    return torch.from_numpy(np.frombuffer(packed, dtype=np.uint8).copy())


def decompress(payload: Tensor, bits: Tensor) -> Tensor:
    """The XOR that `compress` got, as integers like `bits`; ValueError for another size."""
    try:
        unpacked = pa.decompress(
            pa.py_buffer(payload.numpy()), decompressed_size=bits.nbytes, codec=CODEC
        )
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"a payload does not decompress: {error}") from error
    if unpacked.size != bits.nbytes:
        raise ValueError(f"a payload has {unpacked.size} bytes instead of {bits.nbytes}")
    bytes_WN = torch.frombuffer(bytearray(unpacked), dtype=torch.uint8)
    bytes_NW = bytes_WN.view(bits.element_size(), -1).T.contiguous()
    return bytes_NW.view(-1).view(bits.dtype)
