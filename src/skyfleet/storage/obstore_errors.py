"""Errors of obstore as OSErrors with the address, as for a local file."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from skyfleet.errors import MissingExtraError

_INVALID_KEY = re.compile(r'[Pp]ath ("[^"]*") contained empty path segment')


def import_obstore() -> None:
    """Raise MissingExtraError without obstore."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise MissingExtraError("obstore", "s3") from None


@contextmanager
def explain_errors(address: str) -> Iterator[None]:
    """Raise an OSError with the address for an error of obstore."""
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, "no such object or bucket", address) from None
    except BaseError as error:
        if (found := _INVALID_KEY.search(str(error))) is not None:
            reason = f"the key {found[1]} has an empty part; rename or remove that object"
            raise OSError(errno.EINVAL, reason, address) from None
        if "NoSuchBucket" in str(error):
            raise FileNotFoundError(errno.ENOENT, "no such bucket", address) from None
        denied = type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")
        number = errno.EACCES if denied else errno.EIO
        raise OSError(number, _first_sentence(error), address) from None
    except OSError as error:
        if error.filename:
            raise
        raise OSError(error.errno or errno.EIO, _first_sentence(error), address) from None
    except BaseException as error:
        # A panic of Rust code is no Exception, and would end the thread that uploads.
        if type(error).__name__ != "PanicException":
            raise
        raise OSError(errno.EIO, f"obstore failed: {_first_sentence(error)}", address) from None


def _first_sentence(error: BaseException) -> str:
    """Without the structure that obstore prints below its message."""
    text = str(error).partition("\n\nDebug source")[0]
    return " ".join(text.split())[:500]
