"""Mistakes of the agent: malformed and wrong calls, loops, and giving up."""

from __future__ import annotations

from collections.abc import Callable

from tests.analysis.error_messages import ERROR_MESSAGES
from tests.analysis.mistakes import Scene, Write, absent, broken, changed, other, unfit, unreal
from tests.analysis.scripted import Script, faulty

from skyfleet.analysis.failure_class import FailureClass
from skyfleet.chat.message import Message
from skyfleet.envs.env import DONE
from skyfleet.envs.tool_turns import SUBMIT_NAME
from skyfleet.tasks.task import RecordedCall
from skyfleet.trajectories.trajectory import Ending


def stops_early(scene: Scene) -> Script | None:
    place = scene.last_write()
    if place == 0:
        return None
    return Script(task=scene.task, lines=[*scene.before(place), scene.stop()])


def does_another_thing(scene: Scene) -> Script | None:
    """A wrong call that the environment accepts."""
    place = scene.last_write()
    wrong = other(scene, scene.calls[place])
    if wrong is None:
        return None
    first = scene.before(place)
    lines = [*first, scene.act(wrong), scene.stop()]
    return Script(task=scene.task, lines=lines, taken=[len(first)])


def mends_an_error_and_errs(scene: Scene) -> Script | None:
    """A call that fails because of a missing object, then an accepted wrong call."""
    place = scene.last_write()
    missing, wrong = absent(scene, scene.calls[place]), other(scene, scene.calls[place])
    if missing is None or wrong is None:
        return None
    lines = [*map(scene.act, scene.calls[:place]), scene.act(missing), scene.act(wrong)]
    return Script(task=scene.task, lines=[*lines, scene.stop()], refused=[place], taken=[place + 1])


def claims_without_a_call(scene: Scene) -> Script:
    return Script(task=scene.task, lines=[scene.stop_in_words()])


def submits_a_wrong_answer(scene: Scene) -> Script | None:
    if len(scene.calls) < 2 or scene.calls[-1].name != SUBMIT_NAME:
        return None
    wrong = changed(scene.calls[-1], answer=scene.rng.choice(["blue", "12345", "nobody", "Oslo"]))
    return Script(task=scene.task, lines=[*scene.before(len(scene.calls) - 1), scene.act(wrong)])


def says_done_at_once(scene: Scene) -> Script:
    return Script(task=scene.task, lines=[Message(role="assistant", content=DONE)])


def says_it_cannot(scene: Scene) -> Script:
    looks = [scene.look() for _ in range(scene.rng.randrange(3))]
    return Script(task=scene.task, lines=[*looks, scene.refuse()])


def guesses_without_looking(scene: Scene) -> Script | None:
    if scene.calls[-1].name != SUBMIT_NAME:
        return None
    guess = changed(scene.calls[-1], answer=scene.rng.choice(["unknown", "bob", "7", "I guess 3"]))
    return Script(task=scene.task, lines=[scene.act(guess)])


def repeats_a_look(scene: Scene) -> Script:
    again = scene.look()
    return Script(task=scene.task, lines=scene.before(1), forever=[again], max_turns=10)


def repeats_a_refused_call(scene: Scene) -> Script | None:
    wrong = absent(scene, scene.calls[scene.last_write()])
    if wrong is None:
        return None
    first = scene.before(1)
    return Script(
        task=scene.task, lines=first, forever=[scene.act(wrong)], max_turns=9, refused=[len(first)]
    )


def goes_in_a_circle(scene: Scene) -> Script | None:
    one, another = scene.look(), scene.look()
    if one.tool_calls == another.tool_calls:
        return None
    return Script(task=scene.task, lines=[], forever=[one, another], max_turns=10)


def writes_again_and_again(scene: Scene) -> Script | None:
    wrong = other(scene, scene.calls[scene.last_write()])
    if wrong is None or wrong.name == SUBMIT_NAME:
        return None
    times = scene.rng.randrange(5, 9)
    lines = [*scene.before(1), *[scene.act(wrong)] * times, scene.stop()]
    return Script(task=scene.task, lines=lines)


def talks_and_never_calls(scene: Scene) -> Script:
    words = scene.rng.choice(["I will look into it.", "Let me think.", "Working on it."])
    message = Message(role="assistant", content=words)
    return Script(task=scene.task, lines=scene.before(1), forever=[message], max_turns=8)


def stammers(scene: Scene) -> Script:
    piece = scene.rng.choice(["and then ", "I need to check the list. ", ", ", "0 "])
    message = Message(role="assistant", content="Let me see: " + piece * 120)
    return Script(task=scene.task, lines=[*scene.before(1), message], cut_short=True)


def breaks_the_call(scene: Scene) -> Script:
    """Ends with malformed calls."""
    place = scene.last_write()
    tries = [broken(scene, scene.calls[place]) for _ in range(scene.rng.randrange(1, 4))]
    end = scene.rng.choice([scene.stop(), scene.refuse()])
    return Script(task=scene.task, lines=[*scene.before(place), *tries, end])


def never_writes_a_call(scene: Scene) -> Script:
    tries = [broken(scene, scene.rng.choice(scene.calls)) for _ in range(6)]
    return Script(task=scene.task, lines=tries, max_turns=6)


def calls_what_is_not_there(scene: Scene) -> Script:
    place = scene.last_write()
    tries = [scene.act(unreal(scene, scene.calls[place])) for _ in range(2)]
    return Script(task=scene.task, lines=[*scene.before(place), *tries, scene.stop()])


def gives_unfit_arguments(scene: Scene) -> Script | None:
    return _refused(scene, unfit)


def names_what_is_absent(scene: Scene) -> Script | None:
    return _refused(scene, absent)


def _refused(
    scene: Scene, mutate: Callable[[Scene, RecordedCall], RecordedCall | None]
) -> Script | None:
    """One or two failing calls of the last writing tool, then the end of the episode."""
    place = scene.last_write()
    tries = (mutate(scene, scene.calls[place]) for _ in range(scene.rng.randrange(1, 3)))
    wrongs = [wrong for wrong in tries if wrong is not None]
    if not wrongs:
        return None
    first, end = scene.before(place), scene.rng.choice([scene.stop, scene.stop, scene.refuse])()
    lines = [*first, *map(scene.act, wrongs), end]
    return Script(task=scene.task, lines=lines, refused=[len(first)])


def is_reworded(kind: FailureClass) -> Write:
    """The same mistake with the error message of another service.

    Recorded in the labelled set as `is_told_in_other_words`.
    """

    def write(scene: Scene) -> Script | None:
        place = scene.last_write()
        mutate = absent if kind is FailureClass.NOT_FOUND else unfit
        wrong = mutate(scene, scene.calls[place])
        if wrong is None:
            return None
        message = scene.pick(ERROR_MESSAGES[kind])
        lines = [*scene.before(place), scene.act(wrong), scene.stop()]
        open_env = faulty(lambda call: message if _same(call.name, call.arguments, wrong) else None)
        return Script(task=scene.task, lines=lines, open_env=open_env)

    return write


def _same(name: str, arguments: object, call: RecordedCall) -> bool:
    return (name, arguments) == (call.name, call.arguments)


def reads_too_much(scene: Scene) -> Script:
    """Makes different read-only calls until the context is full."""
    looks: list[Message] = []
    for look in [scene.look() for _ in range(20)]:
        if all(look.tool_calls != seen.tool_calls for seen in looks):
            looks.append(look)
    return Script(
        task=scene.task,
        lines=[*looks, scene.stop()],
        max_input_length=scene.rng.randrange(90, 150),
        ending=Ending.CONTEXT_FULL,
    )


def writes_an_essay(scene: Scene) -> Script:
    words = [
        "the",
        "plan",
        "first",
        "needs",
        "every",
        "detail",
        "of",
        "what",
        "was",
        "asked",
        "and",
        "who",
        "is",
        "meant",
        "by",
        "it",
    ]
    essay = " ".join(scene.rng.choice(words) for _ in range(300))
    message = Message(role="assistant", content="", reasoning=essay)
    return Script(task=scene.task, lines=[*scene.before(1), message], cut_short=True)


def is_too_slow(scene: Scene) -> Script | None:
    """Follows the reference solution with one turn too few."""
    n_calls = len(scene.calls)
    if n_calls < 3:
        return None
    return Script(
        task=scene.task, lines=[scene.act(one) for one in scene.calls], max_turns=n_calls - 1
    )


AGENT_MISTAKES: tuple[tuple[FailureClass, Write], ...] = (
    (FailureClass.FALSE_COMPLETION, stops_early),
    (FailureClass.FALSE_COMPLETION, does_another_thing),
    (FailureClass.FALSE_COMPLETION, mends_an_error_and_errs),
    (FailureClass.FALSE_COMPLETION, claims_without_a_call),
    (FailureClass.FALSE_COMPLETION, submits_a_wrong_answer),
    (FailureClass.GAVE_UP, says_done_at_once),
    (FailureClass.GAVE_UP, says_it_cannot),
    (FailureClass.GAVE_UP, guesses_without_looking),
    (FailureClass.LOOP, repeats_a_look),
    (FailureClass.LOOP, repeats_a_refused_call),
    (FailureClass.LOOP, goes_in_a_circle),
    (FailureClass.LOOP, writes_again_and_again),
    (FailureClass.LOOP, talks_and_never_calls),
    (FailureClass.LOOP, stammers),
    (FailureClass.MALFORMED_CALL, breaks_the_call),
    (FailureClass.MALFORMED_CALL, never_writes_a_call),
    (FailureClass.MALFORMED_CALL, calls_what_is_not_there),
    (FailureClass.WRONG_ARGUMENTS, gives_unfit_arguments),
    (
        FailureClass.WRONG_ARGUMENTS,
        is_reworded(FailureClass.WRONG_ARGUMENTS),
    ),
    (FailureClass.NOT_FOUND, names_what_is_absent),
    (FailureClass.NOT_FOUND, is_reworded(FailureClass.NOT_FOUND)),
    (FailureClass.CONTEXT_OVERFLOW, reads_too_much),
    (FailureClass.CONTEXT_OVERFLOW, writes_an_essay),
    (FailureClass.OUT_OF_TURNS, is_too_slow),
)
