"""SkyRL's evaluation dumps: a `{source}.jsonl` an environment and `aggregated_results.jsonl`.

Written for whoever has tools for them, and read where they are all that is left of a run. A dump
holds text: tokens, times and step rewards are not in it.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from skyfleet.chat.message import Message
from skyfleet.chat.tool_calls.hermes import parse_hermes
from skyfleet.chat.transcript import Transcript
from skyfleet.storage.local import write_atomically
from skyfleet.tasks.task import Grade
from skyfleet.trajectories.records import RecordError
from skyfleet.trajectories.trajectory import Ending, Group, Trajectory, Turn

_SPOKEN = re.compile(
    r"<\|im_start\|>(system|user|assistant|tool)\n(.*?)(<\|im_end\|>|(?=<\|im_start\|>)|\Z)",
    re.DOTALL,
)
_TOOL_RESPONSE = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
_FLEET_RESULT = "Tool result:\n"
_ASSISTANT = "<|im_start|>assistant\n"


def split_messages(text: str) -> tuple[Message, ...]:
    """A prompt's messages, without the assistant's that is only begun; other text is one user's."""
    if "<|im_start|>" not in text:
        return (Message(role="user", content=text),) if text else ()
    return tuple(
        message
        for role, said, closed in _SPOKEN.findall(text)
        if closed or role != "assistant"
        for message in _messages(role, said)
    )


def read_response(text: str) -> tuple[Turn, ...]:
    """The turns of a response, which begins in the middle of the assistant's first."""
    turns: list[tuple[Message, list[Message]]] = []
    for role, said, closed in _SPOKEN.findall(_ASSISTANT + text):
        # A turn that was begun and never spoken is none.
        if role == "assistant" and (closed or said.strip()):
            turns.append((parse_hermes(said).message, []))
        elif role != "assistant" and turns:
            turns[-1][1].extend(_messages(role, said))
    return tuple(
        Turn(action=action, replies=tuple(replies), reward=0.0, engine_seconds=0.0)
        for action, replies in turns
    )


def _messages(role: str, said: str) -> Iterator[Message]:
    """Results of tools are the user's words in ChatML; here they are the tool's again."""
    if role == "assistant":
        yield parse_hermes(said).message
    elif responses := _TOOL_RESPONSE.findall(said):
        yield from map(_result, responses)
    elif said.startswith((_FLEET_RESULT, "Error:")):
        yield _result(said.removeprefix(_FLEET_RESULT))
    else:
        yield Message(role="system" if role == "system" else "user", content=said)


def _result(text: str) -> Message:
    return Message(role="tool", content=text, is_error=text.lower().startswith("error:"))


RESULTS = "aggregated_results.jsonl"
OURS = "skyfleet"
"""Of env_extras: what we know and SkyRL does not say."""

STOP_REASONS = {
    Ending.DONE: "stop",
    Ending.MAX_TURNS: "stop",
    Ending.CONTEXT_FULL: "length",
    Ending.LENGTH: "length",
    Ending.TIMEOUT: "timeout",
    Ending.FAILED: "env_init_failed",
}
_ENDINGS = {
    "stop": Ending.DONE,
    "length": Ending.CONTEXT_FULL,
    "prompt_too_long": Ending.CONTEXT_FULL,
    "timeout": Ending.TIMEOUT,
}
"""Every other stop_reason is a failure."""


def dump_folder(export_path: Path, step: int, set_name: str = "val") -> Path:
    """Where SkyRL puts it; a set other than `val` has a folder of its own inside."""
    folder = export_path / "dumped_evals" / f"global_step_{step}_evals"
    return folder if set_name == "val" else folder / set_name


def write_dump(
    folder: Path,
    groups: Sequence[Group],
    metrics: Mapping[str, float],
    *,
    text: Callable[[Sequence[int]], str],
    env_class: str,
    max_turns: int,
) -> None:
    """`text` is the renderer's, special tokens included."""
    rows: dict[str, list[str]] = defaultdict(list)
    for group in groups:
        for trajectory in group.trajectories:
            row = {
                **_said(trajectory, text),
                "stop_reason": STOP_REASONS[trajectory.ending],
                "env_class": env_class,
                "env_extras": {
                    "task_key": group.task_key,
                    "data_source": group.env_key,
                    "max_turns": max_turns,
                    # SkyRL's own fields have no place for these.
                    OURS: {"ending": trajectory.ending.value, "success": trajectory.success},
                },
                "data_source": group.env_key,
            }
            rows[group.env_key].append(json.dumps(row) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    for source, lines in rows.items():
        write_atomically(folder / f"{source.replace('/', '_')}.jsonl", "".join(lines))
    write_atomically(folder / RESULTS, json.dumps(dict(metrics)) + "\n")


def read_dump(folder: Path) -> list[Group]:
    """The attempts of all sources, each task's together."""
    by_task: dict[tuple[str, str], list[Trajectory]] = defaultdict(list)
    for path in sorted(folder.glob("*.jsonl")):
        if path.name != RESULTS:
            for trajectory in read_dump_file(path):
                by_task[trajectory.env_key, trajectory.task_key].append(trajectory)
    if not by_task:
        raise RecordError(
            f"{folder} holds no dumped episode; give a folder like dumped_evals/global_step_0_evals"
        )
    return [
        Group(task_key=task_key, env_key=env_key, trajectories=tuple(attempts))
        for (env_key, task_key), attempts in by_task.items()
    ]


def read_dump_file(path: Path) -> list[Trajectory]:
    """The episodes of one `{source}.jsonl`, their text split into turns."""
    samples: Counter[str] = Counter()
    trajectories = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                extras = row.get("env_extras") or {}
                source = row.get("data_source") or extras.get("data_source") or path.stem
                key = extras.get("task_key") or _key_of(source, row["input_prompt"])
                trajectories.append(_trajectory(row, source, key, samples[key]))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise RecordError(
                    f"{path} line {number}: {type(error).__name__}: {error}; "
                    "give a file that SkyRL's evaluation dumped"
                ) from None
            samples[key] += 1
    return trajectories


def _said(trajectory: Trajectory, text: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    if trajectory.turns and not trajectory.transcripts:
        raise RecordError(
            f"{trajectory.task_key} was played without tokens, and a dump is made of them; "
            "set trainer.dump_eval_results=false"
        )
    # History that was rewritten is told once more in the transcript that came last.
    transcript = trajectory.transcripts[-1] if trajectory.transcripts else Transcript()
    mask = transcript.loss_mask
    begins = mask.index(True) if True in mask else len(mask)
    response_ids = transcript.token_ids[begins:]
    return {
        "input_prompt": text(transcript.token_ids[:begins]),
        "output_response": text(response_ids),
        "score": _score(trajectory.grade, len(response_ids)),
    }


def _score(grade: Grade | None, n_tokens: int) -> list[float] | float:
    """The reward on the last token; an empty list where the grade is unknown."""
    if grade is None:
        return []
    return [*([0.0] * (n_tokens - 1)), grade.reward] if n_tokens else grade.reward


def _trajectory(row: Mapping[str, Any], source: str, key: str, sample: int) -> Trajectory:
    ours = (row.get("env_extras") or {}).get(OURS, {})
    ending = _ENDINGS.get(row.get("stop_reason", "stop"), Ending.FAILED)
    return Trajectory(
        task_key=key,
        env_key=source,
        sample=sample,
        opening=split_messages(row["input_prompt"]),
        turns=read_response(row["output_response"]),
        transcripts=(),
        ending=Ending(ours.get("ending", ending)),
        grade=_grade(row["score"], ending, ours.get("success")),
    )


def _grade(score: list[float] | float, ending: Ending, success: bool | None) -> Grade | None:
    """The sum of a list. SkyRL writes 0 for an episode that was never judged; here it is unknown.

    `success` is what a dump of ours says, where an unknown grade has no score at all.
    """
    if score == []:
        return None
    reward = float(sum(score)) if isinstance(score, list) else float(score)
    if success is not None:
        return Grade(reward=reward, success=success)
    if reward == 0 and ending in (Ending.FAILED, Ending.TIMEOUT):
        return None
    return Grade(reward=reward, success=reward >= 1.0)


def _key_of(source: str, prompt: str) -> str:
    """For dumps that do not name their tasks: the same prompt is the same task."""
    return f"{source}-{sha256(prompt.encode()).hexdigest()[:8]}"


def write_training_dump(
    path: Path, step: int, groups: Sequence[Group], *, text: Callable[[Sequence[int]], str]
) -> None:
    """`text` is the renderer's, special tokens included. An unknown reward is null."""
    now = datetime.now(UTC).isoformat()
    rows = (
        {"step": step, "timestamp": now, **_row(trajectory, text)}
        for group in groups
        for trajectory in group.trajectories
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


def _row(trajectory: Trajectory, text: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    # History that was rewritten is told once more in the transcript that came last.
    last = trajectory.transcripts[-1:]
    token_ids = [token for transcript in last for token in transcript.token_ids]
    mask = [chosen for transcript in last for chosen in transcript.loss_mask]
    begins = mask.index(True) if True in mask else len(mask)
    return {
        "env_key": trajectory.env_key,
        "data_source": trajectory.env_key,
        "task_key": trajectory.task_key,
        "stop_reason": STOP_REASONS[trajectory.ending],
        "reward": trajectory.reward,
        "turns": len(trajectory.turns),
        "tokens": len(token_ids) - begins,
        "prompt": text(token_ids[:begins]),
        "text": text(token_ids[begins:]),
        "image_paths": [],
    }
