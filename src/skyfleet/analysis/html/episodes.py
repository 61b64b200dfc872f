"""Episodes: of each environment one that was won and one that was lost, to be read in place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from skyfleet.analysis.html.elements import Html, command, fold, join, note, section, tag
from skyfleet.analysis.html.formatting import count, number, seconds
from skyfleet.analysis.html.page_data import ShownRun
from skyfleet.chat.message import Image, Message, ToolCall
from skyfleet.errors import SkyfleetError
from skyfleet.trajectories.archive import load
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.trajectory import Trajectory

_MOST_LETTERS = 1500
"""Of one text."""
_MOST_TURNS = 12


def episode_section(runs: Sequence[ShownRun]) -> Html:
    shown = [episode for run in runs for episode in _of_run(run)]
    if not shown:
        return section("episodes", "Episodes", note("No episode was recorded."))
    return section(
        "episodes",
        "Episodes",
        note(
            "Of each environment, the first won and the first lost of the last step that has one; "
            "evaluation before training. Long texts are cut."
        ),
        shown,
    )


def chosen(run: ShownRun) -> list[Entry]:
    """Of each environment one won and one lost, as late as possible, evaluation before training."""
    picked: dict[tuple[str, bool], Entry] = {}
    entries = [*run.training, *run.evaluation]
    # Stable: of one kind and step, the first in the file comes first.
    for entry in sorted(entries, key=lambda entry: (entry.kind == "train", -entry.step)):
        if entry.success is not None:
            picked.setdefault((entry.env_key, entry.success), entry)
    return [picked[place] for place in sorted(picked, key=lambda place: (place[0], not place[1]))]


def _of_run(run: ShownRun) -> Iterator[Html]:
    for entry in chosen(run):
        try:
            episode = load(entry)
        except (SkyfleetError, OSError, IndexError) as error:
            yield note(f"{entry.id} is left out: {error}.")
        else:
            yield _folded(run, entry, episode)


def _folded(run: ShownRun, entry: Entry, episode: Trajectory) -> Html:
    where = f"{entry.set_name} at step {entry.step}" if entry.set_name else f"step {entry.step}"
    summary = join(
        tag("span", "won" if entry.success else "lost", class_="outcome"),
        tag("strong", f"{run.mark} {entry.env_key}".strip()),
        f" {entry.task_key}, {where}, {_plural(entry.turns, 'turn')}",
    )
    return fold(
        summary,
        note("Whole: ", command(run.view_command(entry.id))),
        _episode(episode),
        style="episode won" if entry.success else "episode lost",
    )


def _episode(episode: Trajectory) -> Html:
    messages = [_message(message) for message in episode.opening]
    for turn in episode.turns[:_MOST_TURNS]:
        messages += [_message(turn.action), *(_message(reply) for reply in turn.replies)]
    cut = len(episode.turns) - _MOST_TURNS
    return join(
        tag("ol", messages, class_="messages"),
        note(f"{_plural(cut, 'more turn')}.") if cut > 0 else None,
        note(_end(episode)),
    )


def _end(episode: Trajectory) -> str:
    grade = episode.grade
    # An imported episode has no times.
    after = f" after {seconds(episode.seconds)}" if episode.seconds else ""
    parts = [f"Ended: {episode.ending}{after}."]
    if grade is not None:
        parts.append(f"Reward {number(grade.reward)}.")
        parts.append(_short(grade.explanation))
    if episode.failure is not None:
        parts.append(f"{episode.failure.kind}: {_short(episode.failure.detail)}")
    return " ".join(filter(None, parts))


def _message(message: Message) -> Html:
    error = message.role == "tool" and message.is_error
    return tag(
        "li",
        tag("span", f"{message.role} error" if error else message.role, class_="role"),
        tag(
            "div",
            tag("p", _short(message.reasoning), class_="reasoning") if message.reasoning else None,
            tag("p", _short(message.text)) if message.text else None,
            [_call(call) for call in message.tool_calls],
            [tag("code", f"unreadable call: {_short(m)}") for m in message.malformed_calls],
            _images(message),
        ),
        class_=f"{message.role} error" if error else message.role,
    )


def _call(call: ToolCall) -> Html:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return tag("code", f"{call.name} {_short(arguments)}")


def _images(message: Message) -> Html | None:
    n = sum(isinstance(part, Image) for part in message.content)
    return tag("p", f"{_plural(n, 'image')}, not shown here") if n else None


def _short(text: str) -> str:
    left = len(text) - _MOST_LETTERS
    return f"{text[:_MOST_LETTERS]} … {count(left)} more letters" if left > 0 else text


def _plural(n: int, noun: str) -> str:
    return f"{count(n)} {noun}{'' if n == 1 else 's'}"
