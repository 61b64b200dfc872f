"""Objects that several processes replace: read one with its version, replace it if it still has it."""

from __future__ import annotations

from typing import Any

from skyfleet.storage.objects import open_place
from skyfleet.storage.obstore_errors import explain_errors


def read_version(address: str) -> tuple[bytes, str] | None:
    """An object and its version, which is empty if the server has none; None without an object."""
    place = open_place(address)
    import obstore

    try:
        with explain_errors(address):
            found = obstore.get(place.store, place.key)
            return bytes(found.bytes()), found.meta["e_tag"] or ""
    except FileNotFoundError:
        return None


def replace_version(address: str, data: bytes, version: str | None) -> bool:
    """Replace an object that still has this version, or create it (None); False if it has not.

    A folder, and a server that has no versions or ignores the condition, replaces any.
    """
    place = open_place(address)
    import obstore
    from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

    mode: Any = "create" if version is None else {"e_tag": version} if version else "overwrite"
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
