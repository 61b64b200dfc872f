"""Objects that several processes replace: read one with its version, replace it if it still has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyfleet.storage.objects import open_place
from skyfleet.storage.obstore_errors import explain_errors

Version = Mapping[str, str]
"""S3 and Azure compare the ETag, Google the version (its generation)."""


def read_version(address: str) -> tuple[bytes, Version] | None:
    """An object and its version, which is empty if the server has none; None without an object."""
    place = open_place(address)
    import obstore

    try:
        with explain_errors(address):
            found = obstore.get(place.store, place.key)
            meta = {"e_tag": found.meta["e_tag"], "version": found.meta["version"]}
            return bytes(found.bytes()), {key: value for key, value in meta.items() if value}
    except FileNotFoundError:
        return None


def replace_version(address: str, data: bytes, version: Version | None) -> bool:
    """Replace an object that still has this version, or create it (None); False if it has not.

    A folder, and a server that has no versions or ignores the condition, replaces any.
    """
    place = open_place(address)
    import obstore
    from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

    mode: Any = "create" if version is None else dict(version) or "overwrite"
    with explain_errors(address):
        try:
            obstore.put(place.store, place.key, data, mode=mode, use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            return False
        except FileNotFoundError:
            if version is None:
                raise  # the bucket
            return False
        except (NotSupportedError, NotImplementedError):
            obstore.put(place.store, place.key, data, use_multipart=False)
    return True
