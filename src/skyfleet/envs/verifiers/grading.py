"""Grade a database state: verifier source and the database before and after in, a Grade out.

Source that this process wrote runs in-process, in microseconds; all other source runs in a jail.
"""

from __future__ import annotations

import atexit
import sqlite3
from functools import cache

from skyfleet.envs.verifiers.jail import Jail
from skyfleet.envs.verifiers.run_verifier import (
    BrokenVerifierError,
    TimedOutVerifierError,
    run_verifier,
)
from skyfleet.envs.verifiers.states import load_frozen_state
from skyfleet.envs.verifiers.write_verifier import is_written_here
from skyfleet.errors import VerifierError
from skyfleet.tasks.task import Grade


def shared_jail(*, allow_unconfined: bool = False) -> Jail:
    """Return the jail of this process, which stays open until the process ends."""
    return _open_shared_jail(allow_unconfined)


@cache
def _open_shared_jail(allow_unconfined: bool) -> Jail:
    jail = Jail(allow_unconfined=allow_unconfined)
    atexit.register(jail.close)
    return jail


async def grade_state(
    code: str,
    seed: bytes,
    current: sqlite3.Connection,
    final_answer: str | None,
    *,
    conversation: str | None = None,
    partial_credit: bool = False,
    retries: int = 2,
    timeout_seconds: float = 30.0,
    allow_unconfined: bool = False,
    jail: Jail | None = None,
) -> Grade:
    """Return the grade, or raise VerifierError: an unknown grade is not a zero.

    `seed` is the image of the initial database, `conversation` is JSON. A failed verification is
    retried unless its source can never run or it took too long.
    """
    if is_written_here(code):
        return run_verifier(
            code,
            load_frozen_state(seed),
            current,
            final_answer,
            conversation=conversation,
            partial_credit=partial_credit,
        )
    jail = jail or shared_jail(allow_unconfined=allow_unconfined)
    image = current.serialize()
    while True:
        try:
            return await jail.verify(
                code,
                seed,
                image,
                final_answer,
                conversation,
                partial_credit=partial_credit,
                timeout_seconds=timeout_seconds,
            )
        except VerifierError as error:
            if isinstance(error, BrokenVerifierError | TimedOutVerifierError) or retries <= 0:
                raise
            retries -= 1
