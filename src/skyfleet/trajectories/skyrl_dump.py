"""Write and read SkyRL's dumps: `{source}.jsonl` per environment and `aggregated_results.jsonl`.

They are written for users with tools for that format, and read if a run left nothing else. A dump
holds text: it has no tokens, times or step rewards.
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
from skyfleet.storage.local import make_folder, write_atomically
from skyfleet.tasks.task import Grade
from skyfleet.trajectories.records import RecordError
from skyfleet.trajectories.trajectory import Ending, Group, Trajectory, Turn

_CHATML_MESSAGE = re.compile(
    r"<\|im_start\|>(system|user|assistant|tool)\n(.*?)(<\|im_end\|>|(?=<\|im_start\|>)|\Z)",
    re.DOTALL,
)
_TOOL_RESPONSE = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
_FLEET_RESULT = "Tool result:\n"
_ASSISTANT = "<|im_start|>assistant\n"


def split_messages(text: str) -> tuple[Message, ...]:
    """Split a prompt into messages, without an assistant message that only starts.

    Text that is not ChatML becomes one user message.
    """
    if "<|im_start|>" not in text:
        return (Message(role="user", content=text),) if text else ()
    return tuple(
        message
        for role, content, closed in _CHATML_MESSAGE.findall(text)
        if closed or role != "assistant"
        for message in _parse_messages(role, content)
    )


def read_response(text: str) -> tuple[Turn, ...]:
    """Split a response, which starts inside the first assistant message, into turns."""
    turns: list[tuple[Message, list[Message]]] = []
    for role, content, closed in _CHATML_MESSAGE.findall(_ASSISTANT + text):
        # A turn that only starts and has no text is not one.
        if role == "assistant" and (closed or content.strip()):
            turns.append((parse_hermes(content).message, []))
        elif role != "assistant" and turns:
            turns[-1][1].extend(_parse_messages(role, content))
    return tuple(
        Turn(action=action, replies=tuple(replies), reward=0.0, engine_seconds=0.0)
        for action, replies in turns
    )


def _parse_messages(role: str, content: str) -> Iterator[Message]:
    """ChatML writes tool results as user messages; turn them back into tool messages."""
    if role == "assistant":
        yield parse_hermes(content).message
    elif responses := _TOOL_RESPONSE.findall(content):
        yield from map(_parse_result, responses)
    elif content.startswith((_FLEET_RESULT, "Error:")):
        yield _parse_result(content.removeprefix(_FLEET_RESULT))
    else:
        yield Message(role="system" if role == "system" else "user", content=content)


def _parse_result(text: str) -> Message:
    return Message(role="tool", content=text, is_error=text.lower().startswith("error:"))


RESULTS = "aggregated_results.jsonl"
OURS = "skyfleet"
"""The key in env_extras for what SkyRL's own fields cannot hold."""

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
    """Return SkyRL's folder of a step; a set other than `val` gets a subfolder."""
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
    """Write the groups as SkyRL does; `text` decodes tokens, special tokens included."""
    rows: dict[str, list[str]] = defaultdict(list)
    for group in groups:
        for trajectory in group.trajectories:
            row = {
                **_format_episode(trajectory, text),
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
    make_folder(folder)
    for source, lines in rows.items():
        write_atomically(folder / f"{source.replace('/', '_')}.jsonl", "".join(lines))
    write_atomically(folder / RESULTS, json.dumps(dict(metrics)) + "\n")


def read_dump(folder: Path) -> list[Group]:
    """Read the attempts of all sources, grouped by task."""
    by_task: dict[tuple[str, str], list[Trajectory]] = defaultdict(list)
    for path in sorted(folder.glob("*.jsonl")):
        if path.name != RESULTS:
            for trajectory in read_dump_file(path):
                by_task[trajectory.env_key, trajectory.task_key].append(trajectory)
    if not by_task:
        raise RecordError(
            f"{folder} has no dumped episode; pass a folder like dumped_evals/global_step_0_evals"
        )
    return [
        Group(task_key=task_key, env_key=env_key, trajectories=tuple(attempts))
        for (env_key, task_key), attempts in by_task.items()
    ]


def read_dump_file(path: Path) -> list[Trajectory]:
    """Read the episodes of one `{source}.jsonl`, with their text split into turns."""
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
                key = extras.get("task_key") or _make_key(source, row["input_prompt"])
                trajectories.append(_parse_trajectory(row, source, key, samples[key]))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise RecordError(
                    f"{path} line {number}: {type(error).__name__}: {error}; "
                    "pass a file that SkyRL's evaluation dumped"
                ) from None
            samples[key] += 1
    return trajectories


def _format_episode(trajectory: Trajectory, text: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    if trajectory.turns and not trajectory.transcripts:
        raise RecordError(
            f"{trajectory.task_key} has no tokens, which a dump needs; "
            "set trainer.dump_eval_results=false"
        )
    # The last transcript repeats history that was rewritten.
    transcript = trajectory.transcripts[-1] if trajectory.transcripts else Transcript()
    mask = transcript.loss_mask
    start = mask.index(True) if True in mask else len(mask)
    response_ids = transcript.token_ids[start:]
    return {
        "input_prompt": text(transcript.token_ids[:start]),
        "output_response": text(response_ids),
        "score": _format_score(trajectory.grade, len(response_ids)),
    }


def _format_score(grade: Grade | None, n_tokens: int) -> list[float] | float:
    """Put the reward on the last token; return an empty list if the grade is unknown."""
    if grade is None:
        return []
    return [*([0.0] * (n_tokens - 1)), grade.reward] if n_tokens else grade.reward


def _parse_trajectory(row: Mapping[str, Any], source: str, key: str, sample: int) -> Trajectory:
    ours = (row.get("env_extras") or {}).get(OURS, {})
    ending = _ENDINGS.get(row.get("stop_reason", "stop"), Ending.FAILED)
    return Trajectory(
        task_key=key,
        env_key=source,
        sample=sample,
        prompt=split_messages(row["input_prompt"]),
        turns=read_response(row["output_response"]),
        transcripts=(),
        ending=Ending(ours.get("ending", ending)),
        grade=_parse_grade(row["score"], ending, ours.get("success")),
    )


def _parse_grade(score: list[float] | float, ending: Ending, success: bool | None) -> Grade | None:
    """Sum a list of scores. SkyRL writes 0 for an episode that was never graded: that is unknown.

    `success` comes from our own dumps, where an unknown grade has no score at all.
    """
    if score == []:
        return None
    reward = float(sum(score)) if isinstance(score, list) else float(score)
    if success is not None:
        return Grade(reward=reward, success=success)
    if reward == 0 and ending in (Ending.FAILED, Ending.TIMEOUT):
        return None
    return Grade(reward=reward, success=reward >= 1.0)


def _make_key(source: str, prompt: str) -> str:
    """Derive a key for dumps without task keys: the same prompt is the same task."""
    return f"{source}-{sha256(prompt.encode()).hexdigest()[:8]}"


def write_training_dump(
    path: Path, step: int, groups: Sequence[Group], *, text: Callable[[Sequence[int]], str]
) -> None:
    """Write a training step as SkyRL does; `text` decodes tokens. An unknown reward is null."""
    now = datetime.now(UTC).isoformat()
    rows = (
        {"step": step, "timestamp": now, **_format_row(trajectory, text)}
        for group in groups
        for trajectory in group.trajectories
    )
    make_folder(path.parent)
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


def _format_row(trajectory: Trajectory, text: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    # The last transcript repeats history that was rewritten.
    last = trajectory.transcripts[-1:]
    token_ids = [token for transcript in last for token in transcript.token_ids]
    mask = [sampled for transcript in last for sampled in transcript.loss_mask]
    start = mask.index(True) if True in mask else len(mask)
    return {
        "env_key": trajectory.env_key,
        "data_source": trajectory.env_key,
        "task_key": trajectory.task_key,
        "stop_reason": STOP_REASONS[trajectory.ending],
        "reward": trajectory.reward,
        "turns": len(trajectory.turns),
        "tokens": len(token_ids) - start,
        "prompt": text(token_ids[:start]),
        "text": text(token_ids[start:]),
        "image_paths": [],
    }
