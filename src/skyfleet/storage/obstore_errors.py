"""Errors of obstore as OSErrors with the address, as for a local file."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from skyfleet.errors import MissingExtraError


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
        raise OSError(classify_error(error), _explain_answer(error), address) from None
    except OSError as error:
        if error.filename:
            raise
        refused = isinstance(error, PermissionError)  # obstore's own has no number
        number = error.errno or (errno.EACCES if refused else errno.EIO)
        raise OSError(number, _explain_answer(error), address) from None
    except BaseException as error:
        # A panic of Rust code is no Exception, and would end the thread that uploads.
        if type(error).__name__ != "PanicException":
            raise
        raise OSError(errno.EIO, f"obstore failed: {_first_sentence(error)}", address) from None


def classify_error(error: BaseException) -> int:
    """EACCES: the server refuses; ENOENT: nothing is there; EIO: an outage, which may end by itself.

    obstore has classes for some of these, and only for requests of single objects.
    """
    status, code = _read_answer(error)
    if code == "NoSuchBucket" or status == 404:
        return errno.ENOENT
    name = type(error).__name__
    refused = name in ("PermissionDeniedError", "UnauthenticatedError") or status in _REFUSED
    return errno.EACCES if refused or code in _REFUSED_CODES else errno.EIO


def _explain_answer(error: BaseException) -> str:
    """S3's code and message without their XML."""
    _, code = _read_answer(error)
    if code == "NoSuchBucket":
        return "no such bucket"
    if not code:
        return _first_sentence(error)
    message = re.search(r"<Message>([^<]*)</Message>", str(error))
    remedy = _REMEDIES.get(code, "")
    answer = f"{code}: {' '.join(message[1].split())}" if message and message[1].strip() else code
    return f"{answer[:400]}{remedy}"


def _read_answer(error: BaseException) -> tuple[int, str]:
    """The status of HTTP and the code of S3 that obstore quotes; 0 and empty if there are none."""
    text = str(error)
    if _REDIRECT in text:  # obstore quotes neither
        return 301, "PermanentRedirect"
    status = re.search(r"status code: (\d{3})", text)
    code = re.search(r"<Code>(\w+)</Code>", text)
    return int(status[1]) if status else 0, code[1] if code else ""


_REDIRECT = "redirect without LOCATION"
_REFUSED = (301, 307, 401, 403)
"""S3 redirects a request for a bucket of another region."""
_REFUSED_CODES = frozenset(
    {
        *("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "RequestTimeTooSkewed"),
        *("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "AuthorizationHeaderMalformed"),
        *("PermanentRedirect", "TemporaryRedirect", "IllegalLocationConstraintException"),
        *("InvalidBucketName", "AccountProblem", "AllAccessDisabled"),
    }
)
_REMEDIES = {
    "ExpiredToken": "; export new credentials",
    "InvalidToken": "; export new credentials",
    "RequestTimeTooSkewed": "; set this machine's clock",
    **dict.fromkeys(
        ("PermanentRedirect", "AuthorizationHeaderMalformed"),
        "; the bucket is in another region, set AWS_REGION to it",
    ),
}


def _first_sentence(error: BaseException) -> str:
    """Without the structure that obstore prints below its message."""
    text = str(error).partition("\n\nDebug source")[0]
    return " ".join(text.split())[:500]
