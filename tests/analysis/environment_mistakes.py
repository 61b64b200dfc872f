"""Failures outside the agent: permissions, services, environment, verifier and engine."""

from __future__ import annotations

from tests.analysis.error_messages import ERROR_MESSAGES
from tests.analysis.mistakes import Scene, Write, changed
from tests.analysis.scripted import Fault, Line, Script, faulty

from skyfleet.analysis.failure_class import FailureClass
from skyfleet.chat.message import ToolCall
from skyfleet.envs.tool_turns import SUBMIT_NAME
from skyfleet.errors import EngineError, EnvError
from skyfleet.worlds.reddit import reddit

CRASHES = (
    "def validate_task(env, final_answer=None):\n    return 1 / 0\n",
    "def validate_task(env, final_answer=None):\n    raise RuntimeError('judge is down')\n",
    "def validate_task(env, final_answer=None):\n    return env.db('current').table('nowhere').all()\n",
    "def validate_task(env, final_answer=None)\n    return 1\n",
)
TOO_LONG = "400 This model's maximum context length is 32768 tokens, the messages have 40122 tokens"


def has_no_account(scene: Scene) -> Script | None:
    """An unknown user in booking."""
    if scene.task.env_key != "booking":
        return None
    who = scene.task.env_variables | {"LOGGED_IN_USER": scene.rng.choice(["zed", "mallory"])}
    task = scene.task.model_copy(update={"env_variables": who})
    place = scene.last_write()
    if scene.calls[place].name == SUBMIT_NAME:
        return None
    lines = [*map(scene.act, scene.calls[: place + 1]), scene.stop()]
    return Script(task=task, lines=lines, refused=[place])


def moderates_elsewhere(scene: Scene) -> Script | None:
    """A post in a subreddit that the user does not moderate."""
    place = scene.last_write()
    call = scene.calls[place]
    if call.name != "moderate_post":
        return None
    elsewhere = changed(call, post_id=scene.rng.choice(_posts_of_others(scene)))
    first = scene.before(place)
    return Script(
        task=scene.task,
        lines=[*first, scene.act(elsewhere), scene.stop()],
        refused=[len(first)],
    )


def _posts_of_others(scene: Scene) -> list[int]:
    """Posts in subreddits that the user does not moderate."""
    seed = int((scene.task.data_key or "").removeprefix("seed-"))
    app = reddit.open(seed, scene.task.env_variables)
    ids = app.db.column(
        "select posts.id from posts join subreddits on subreddits.name = posts.subreddit "
        "where subreddits.moderator != ?",
        app.user,
    )
    app.db.close()
    return list(ids)


def is_answered(kind: FailureClass, *, tries: int) -> Write:
    """The last writing tool always returns this error."""

    def write(scene: Scene) -> Script | None:
        place = scene.last_write()
        call = scene.calls[place]
        message = scene.pick(ERROR_MESSAGES[kind])
        asked = [scene.act(call)] * scene.rng.randrange(1, tries + 1)
        end = scene.rng.choice([scene.stop, scene.refuse])()
        looks = [scene.look()] if scene.rng.random() < 0.3 and call.name != SUBMIT_NAME else []
        return Script(
            task=scene.task,
            lines=[*scene.before(place), *asked, *looks, end],
            open_env=faulty(_only(call.name, message)),
        )

    return write


def breaks_down(scene: Scene) -> Script:
    """The environment raises during the episode or at reset."""
    error = scene.rng.choice(
        [
            RuntimeError("the page crashed"),
            EnvError("ws://env:8000: answered '', which is no OpenEnv frame"),
            ConnectionResetError("[Errno 104] Connection reset by peer"),
            EnvError("env_key='github': Fleet made no instance: 400 unknown version"),
        ]
    )
    place = scene.last_write()
    lines = [*scene.before(place), scene.act(scene.calls[place]), scene.stop()]
    open_env = faulty(_only(scene.calls[place].name, error))
    if scene.rng.random() < 0.3:
        open_env = faulty(lambda _: None, at_reset=error)
    return Script(task=scene.task, lines=lines, open_env=open_env)


def does_not_answer(scene: Scene) -> Script:
    error = scene.rng.choice(
        [
            EnvError("https://mcp.example/mcp: tools/call not answered in 60 s"),
            EnvError("tool list_orders: no answer after 90 s; it hangs"),
            EnvError("env_key='reddit': Fleet made no instance: 429 too many in-flight requests"),
        ]
    )
    place = scene.last_write()
    return Script(
        task=scene.task,
        lines=[*scene.before(place), scene.act(scene.calls[place])],
        open_env=faulty(_only(scene.calls[place].name, error)),
    )


def takes_too_long(scene: Scene) -> Script:
    place = scene.last_write()
    return Script(
        task=scene.task,
        lines=[*scene.before(place), scene.act(scene.calls[place])],
        open_env=faulty(_only(scene.calls[place].name, 5.0)),
        seconds=0.2,
    )


def is_judged_by_a_crash(scene: Scene) -> Script:
    """The verifier crashes, whether or not the task is solved."""
    task = scene.task.model_copy(update={"verifier_code": scene.rng.choice(CRASHES)})
    n_calls = scene.rng.randrange(1, len(scene.calls) + 1)
    lines: list[Line] = [*scene.before(n_calls), scene.stop()]
    return Script(task=task, lines=lines)


def is_too_long_for_its_engine(scene: Scene) -> Script:
    return Script(task=scene.task, lines=[*scene.before(1), EngineError(TOO_LONG)])


def _only(name: str, wrong: str | Exception | float) -> Fault:
    def fault(call: ToolCall) -> str | Exception | float | None:
        return wrong if call.name == name else None

    return fault


ENVIRONMENT_MISTAKES: tuple[tuple[FailureClass, Write], ...] = (
    (FailureClass.UNAUTHORISED, has_no_account),
    (FailureClass.UNAUTHORISED, moderates_elsewhere),
    (FailureClass.UNAUTHORISED, is_answered(FailureClass.UNAUTHORISED, tries=2)),
    (FailureClass.LIMIT, is_answered(FailureClass.LIMIT, tries=5)),
    (FailureClass.LIMIT, does_not_answer),
    (FailureClass.LIMIT, takes_too_long),
    (FailureClass.ENVIRONMENT_FAULT, is_answered(FailureClass.ENVIRONMENT_FAULT, tries=2)),
    (FailureClass.ENVIRONMENT_FAULT, breaks_down),
    (FailureClass.VERIFIER_FAULT, is_judged_by_a_crash),
    (FailureClass.CONTEXT_OVERFLOW, is_too_long_for_its_engine),
)
