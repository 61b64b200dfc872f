"""Pack verifier source as Fleet does: a zip archive that contains verifier.py."""

from __future__ import annotations

import hashlib
import zlib
from functools import lru_cache
from io import BytesIO
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

_SOURCE = "verifier.py"
_MAX_BYTES = 1_000_000
"""Of source; a small zip can unpack to any size."""


@lru_cache(maxsize=4096)
def pack(code: str) -> bytes:
    """Pack deterministically, so that a service recognises known source by its digest."""
    packed = BytesIO()
    with ZipFile(packed, "w", ZIP_DEFLATED) as bundle:
        bundle.writestr(ZipInfo("requirements.txt"), "fleet-python")
        bundle.writestr(ZipInfo(_SOURCE), code)
    return packed.getvalue()


def unpack(bundle: bytes) -> str:
    """Return the source without running it; ValueError describes an invalid bundle."""
    try:
        with ZipFile(BytesIO(bundle)) as files, files.open(_SOURCE) as source:
            code = source.read(_MAX_BYTES + 1)
    except KeyError:
        raise ValueError(f"the bundle has no {_SOURCE}; add it") from None
    except (BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise ValueError(f"the bundle is not a readable zip: {error}") from error
    if len(code) > _MAX_BYTES:
        raise ValueError(f"{_SOURCE} has more than {_MAX_BYTES} bytes; send less")
    return code.decode()


def digest(bundle: bytes) -> str:
    return hashlib.sha256(bundle).hexdigest()
