"""Bundle: verifier source as Fleet sends it, a zip with verifier.py in it."""

from __future__ import annotations

import hashlib
import zlib
from functools import lru_cache
from io import BytesIO
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

_SOURCE = "verifier.py"
_MOST_BYTES = 1_000_000
"""Of source; a zip may promise to unfold into anything."""


@lru_cache(maxsize=4096)
def pack(code: str) -> bytes:
    """The same source is the same bytes, so a service that has it knows it by its digest."""
    packed = BytesIO()
    with ZipFile(packed, "w", ZIP_DEFLATED) as bundle:
        bundle.writestr(ZipInfo("requirements.txt"), "fleet-python")
        bundle.writestr(ZipInfo(_SOURCE), code)
    return packed.getvalue()


def unpack(bundle: bytes) -> str:
    """The source; nothing of it is run. ValueError says what is wrong with the bundle."""
    try:
        with ZipFile(BytesIO(bundle)) as files, files.open(_SOURCE) as source:
            code = source.read(_MOST_BYTES + 1)
    except KeyError:
        raise ValueError(f"the bundle has no {_SOURCE}; add it") from None
    except (BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise ValueError(f"the bundle is no readable zip: {error}") from error
    if len(code) > _MOST_BYTES:
        raise ValueError(f"{_SOURCE} has more than {_MOST_BYTES} bytes; send less")
    return code.decode()


def digest(bundle: bytes) -> str:
    return hashlib.sha256(bundle).hexdigest()
