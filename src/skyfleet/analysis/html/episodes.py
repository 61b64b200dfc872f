"""Episodes section: one passed and one failed episode per environment."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from skyfleet.analysis.html.elements import Html, command, fold, join, note, section, tag
from skyfleet.analysis.html.formatting import count, number, seconds
from skyfleet.analysis.html.page_data import ReportRun
from skyfleet.chat.message import Image, Message, ToolCall
from skyfleet.errors import SkyfleetError
from skyfleet.trajectories.archive import load
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.trajectory import Trajectory

_MAX_CHARACTERS = 1500
"""Longer texts are truncated."""
_MAX_TURNS = 12


def episode_section(runs: Sequence[ReportRun]) -> Html:
    episodes = [episode for run in runs for episode in _run_episodes(run)]
    if not episodes:
        return section("episodes", "Episodes", note("No episodes are recorded."))
    return section(
        "episodes",
        "Episodes",
        note(
            "Per environment the first passed and the first failed episode of the last step that "
            "has one, evaluation before training. Long texts are truncated."
        ),
        episodes,
    )


def select_examples(run: ReportRun) -> list[Entry]:
    """Per environment one passed and one failed episode, latest first, evaluation preferred."""
    picked: dict[tuple[str, bool], Entry] = {}
    entries = [*run.training, *run.evaluation]
    # The sort is stable: within a kind and step, the order of the file.
    for entry in sorted(entries, key=lambda entry: (entry.kind == "train", -entry.step)):
        if entry.success is not None:
            picked.setdefault((entry.env_key, entry.success), entry)
    return [picked[key] for key in sorted(picked, key=lambda key: (key[0], not key[1]))]


def _run_episodes(run: ReportRun) -> Iterator[Html]:
    for entry in select_examples(run):
        try:
            episode = load(entry)
        except (SkyfleetError, OSError, IndexError) as error:
            yield note(f"{entry.id} is skipped: {error}.")
        else:
            yield _fold_episode(run, entry, episode)


def _fold_episode(run: ReportRun, entry: Entry, episode: Trajectory) -> Html:
    where = f"{entry.set_name} at step {entry.step}" if entry.set_name else f"step {entry.step}"
    summary = join(
        tag("span", "passed" if entry.success else "failed", class_="outcome"),
        tag("strong", f"{run.mark} {entry.env_key}".strip()),
        f" {entry.task_key}, {where}, {_plural(entry.turns, 'turn')}",
    )
    return fold(
        summary,
        note("Full episode: ", command(run.view_command(entry.id))),
        _episode(episode),
        style="episode passed" if entry.success else "episode failed",
    )


def _episode(episode: Trajectory) -> Html:
    messages = [_message(message) for message in episode.prompt]
    for turn in episode.turns[:_MAX_TURNS]:
        messages += [_message(turn.action), *(_message(reply) for reply in turn.replies)]
    cut = len(episode.turns) - _MAX_TURNS
    return join(
        tag("ol", messages, class_="messages"),
        note(f"{_plural(cut, 'more turn')}.") if cut > 0 else None,
        note(_end(episode)),
    )


def _end(episode: Trajectory) -> str:
    grade = episode.grade
    # Imported episodes have no times.
    after = f" after {seconds(episode.seconds)}" if episode.seconds else ""
    parts = [f"Ended: {episode.ending}{after}."]
    if grade is not None:
        parts.append(f"Reward {number(grade.reward)}.")
        parts.append(_truncate(grade.explanation))
    if episode.failure is not None:
        parts.append(f"{episode.failure.kind}: {_truncate(episode.failure.detail)}")
    return " ".join(filter(None, parts))


def _message(message: Message) -> Html:
    error = message.role == "tool" and message.is_error
    return tag(
        "li",
        tag("span", f"{message.role} error" if error else message.role, class_="role"),
        tag(
            "div",
            tag("p", _truncate(message.reasoning), class_="reasoning")
            if message.reasoning
            else None,
            tag("p", _truncate(message.text)) if message.text else None,
            [_call(call) for call in message.tool_calls],
            [tag("code", f"malformed call: {_truncate(m)}") for m in message.malformed_calls],
            _images(message),
        ),
        class_=f"{message.role} error" if error else message.role,
    )


def _call(call: ToolCall) -> Html:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    mark = f" (repaired: {call.repair})" if call.repair else ""
    return tag("code", f"{call.name} {_truncate(arguments)}{mark}")


def _images(message: Message) -> Html | None:
    n = sum(isinstance(part, Image) for part in message.content)
    return tag("p", f"{_plural(n, 'image')}, not shown here") if n else None


def _truncate(text: str) -> str:
    left = len(text) - _MAX_CHARACTERS
    return f"{text[:_MAX_CHARACTERS]} … {count(left)} more characters" if left > 0 else text


def _plural(n: int, noun: str) -> str:
    return f"{count(n)} {noun}{'' if n == 1 else 's'}"
