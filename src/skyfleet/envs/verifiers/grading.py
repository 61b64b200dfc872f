"""Grade a state: the verifier's source, the database before and after, in; a grade out.

Source that this process wrote runs here, in microseconds; all other source runs in a jail.
"""

from __future__ import annotations

import atexit
import sqlite3
from functools import cache

from skyfleet.envs.verifiers.jail import Jail
from skyfleet.envs.verifiers.running import BrokenVerifierError, run_verifier
from skyfleet.envs.verifiers.states import frozen_state
from skyfleet.envs.verifiers.writing import written_here
from skyfleet.errors import VerifierError
from skyfleet.tasks.task import Grade


@cache
def shared_jail() -> Jail:
    """One for the whole process, open until it ends."""
    jail = Jail()
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
    jail: Jail | None = None,
) -> Grade:
    """The grade, or VerifierError: it is unknown, which is not a zero.

    `seed` is the image of the database as it was, `conversation` is JSON. What fails is tried
    again, unless the source is such that it never runs.
    """
    if written_here(code):
        return run_verifier(
            code,
            frozen_state(seed),
            current,
            final_answer,
            conversation=conversation,
            partial_credit=partial_credit,
        )
    jail, image = jail or shared_jail(), current.serialize()
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
            if isinstance(error, BrokenVerifierError) or retries <= 0:
                raise
            retries -= 1
