"""Write the source of a verifier in Fleet's style from the expected changes and answer."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.envs.verifiers.difference import Change
from skyfleet.envs.verifiers.replies import RequiredReplies

_SOURCE = """\
def validate_task(env, final_answer=None{conversation}):
    error_accumulator = []
    success_accumulator = []
    env.instance.load()
    seed = env.db("seed")
    current = env.db("current")
    expected_changes = [{changes}]
    try:
        seed.diff(current).expect_exactly(expected_changes)
{rows}        success_accumulator.append("[C] Exactly the expected changes were made")
    except AssertionError as error:
        error_accumulator.append(f"[X] {{error}}")
{answer}{replies}    if error_accumulator:
        print(f">>> ERROR_ACCUMULATOR >>>\\n{{error_accumulator}}\\n<<< ERROR_ACCUMULATOR <<<")
    print(f">>> SUCCESS_ACCUMULATOR >>>\\n{{success_accumulator}}\\n<<< SUCCESS_ACCUMULATOR <<<")
    return TASK_FAILED_SCORE if error_accumulator else TASK_SUCCESSFUL_SCORE
"""

# Equality, not normalized_contains: an answer that lists every candidate would always pass.
_ANSWER = """\
    if normalized_string_comparison({answer!r}, final_answer or ""):
        success_accumulator.append("[C] The answer is right")
    else:
        error_accumulator.append(f"[X] The answer is {{final_answer!r}}, expected " + {answer!r})
"""


def write_verifier(
    changes: Sequence[Change], answer: str | None, *, replies: RequiredReplies | None = None
) -> str:
    """Return source that passes if exactly these changes were made and this answer was given.

    Without an `answer` only the changes count. `replies`: what the conversation must hold too.
    """
    specs = "".join(f"\n        {_spec(change)!r}," for change in changes)
    # Fleet's own expect_exactly accepts a row that has only one of two expected changes.
    rows = [
        _row(change) for change in changes if change.kind == "modify" and len(change.altered) > 1
    ]
    code = _SOURCE.format(
        changes=specs and specs + "\n    ",
        rows="".join(f"        {row}.assert_exists()\n" for row in rows),
        answer="" if answer is None else _ANSWER.format(answer=answer),
        conversation=", conversation=None" if replies else "",
        replies=replies.write_source() if replies else "",
    )
    _written.add(code)
    return code


def is_written_here(code: str) -> bool:
    """Whether this process wrote exactly this source, so that it is safe to run without a jail."""
    return code in _written


_written: set[str] = set()


def _row(change: Change) -> str:
    """Write a query for the changed row."""
    query = [f"current.table({change.table!r})"]
    for name in (*change.key_columns, *sorted(change.altered)):
        value = change.row[name]
        query.append(f"is_null({name!r})" if value is None else f"eq({name!r}, {value!r})")
    return ".".join(query)


def _spec(change: Change) -> dict[str, object]:
    spec: dict[str, object] = {"table": change.table, "pk": change.pk, "type": change.kind}
    if change.kind == "insert":
        spec["fields"] = list(change.row.items())
    if change.kind == "modify":
        spec["resulting_fields"] = [(name, change.row[name]) for name in sorted(change.altered)]
        spec["no_other_changes"] = True
    return spec
