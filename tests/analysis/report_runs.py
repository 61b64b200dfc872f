"""Small run folders, written with the production code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.trajectories.making import attempt

from skyfleet.analysis.run_folder import RunFolder, open_run
from skyfleet.chat.message import Image, Message, Text, ToolCall
from skyfleet.config.keys import dump_yaml
from skyfleet.config.loading import load_config
from skyfleet.evaluation.report import EvalReport
from skyfleet.tasks.task import Grade
from skyfleet.trajectories.archive import eval_path, train_path, write_groups
from skyfleet.trajectories.trajectory import Ending, Failure, Group, Trajectory, Turn

Rows = Sequence[Mapping[str, float]]


def empty_run(folder: Path, *overrides: str) -> RunFolder:
    """A run with a configuration and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    config = load_config("", overrides)
    (folder / "config.yaml").write_text(dump_yaml(config))
    return open_run(folder)


def add_rows(run: RunFolder, metrics: Rows, timing: Rows) -> None:
    for name, rows in (("metrics", metrics), ("timing", timing)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (run.path / f"{name}.jsonl").write_text(lines)


def add_training(run: RunFolder, step: int, groups: Sequence[Group]) -> None:
    write_groups(train_path(run.trajectories, step), groups)


def add_evaluation(
    run: RunFolder, name: str, step: int, groups: Sequence[Group], **known: Any
) -> None:
    """`known` are further arguments of the report: tasks, trained_envs, baselines."""
    write_groups(eval_path(run.trajectories, name, step), groups)
    folder = run.path / "reports" / f"step_{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    report = EvalReport.from_groups(name, groups, step=step, **known)
    (folder / f"{name}.json").write_text(report.to_json())


def rewarded(rewards: Sequence[float | None], *, n_tasks: int, env_key: str) -> list[Group]:
    """Tasks that all have the same rewards."""
    return [
        Group(
            task_key=f"{env_key}-{n}",
            env_key=env_key,
            trajectories=tuple(
                attempt(reward, task_key=f"{env_key}-{n}", env_key=env_key) for reward in rewards
            ),
        )
        for n in range(n_tasks)
    ]


def small_run(folder: Path, *, n_steps: int = 8, lifts: bool = True) -> RunFolder:
    """Two environments; twenty tasks of one set that fail at first and, if `lifts`, pass at last."""
    run = empty_run(folder, "trainer.seed=7")
    for step in range(1, n_steps + 1):
        groups = rewarded([1.0, 0.0], n_tasks=2, env_key="mail")
        add_training(run, step, [*groups, *rewarded([0.0, None], n_tasks=1, env_key="maps")])
    last = 1.0 if lifts else 0.0
    add_evaluation(run, "unseen", 0, rewarded([0.0], n_tasks=20, env_key="mail"))
    add_evaluation(run, "unseen", n_steps, rewarded([last], n_tasks=20, env_key="mail"))
    steps = range(n_steps + 1)
    add_rows(
        run,
        [{"step": step, "sentinel/gap": 0.5 * step} for step in steps],
        [{"step": step, "timing/rollout": 30.0, "timing/learn": 10.0} for step in steps],
    )
    return run


def episode_with_text(text: str, *, won: bool) -> Trajectory:
    """An episode with the text in every field."""
    call = ToolCall(id="0", name=text, arguments={text: text})
    action = Message(
        role="assistant",
        content=(Text(text), Image(text.encode(errors="ignore"))),
        reasoning=text,
        tool_calls=(call,),
        malformed_calls=(text,),
    )
    reply = Message(role="tool", content=text, tool_call_id="0", is_error=True)
    # A task with half a surrogate pair in its key is rejected.
    key = text.encode(errors="ignore").decode()
    return Trajectory(
        task_key=key,
        env_key=key,
        sample=0,
        prompt=(Message(role="system", content=text), Message(role="user", content=text)),
        turns=(Turn(action=action, replies=(reply,), reward=0.0, engine_seconds=1.0),),
        transcripts=(),
        ending=Ending.DONE,
        grade=Grade(reward=float(won), success=won, parts={text: 1.0}, explanation=text),
        failure=Failure(kind=text, detail=text),
    )


def run_with_text(folder: Path, text: str, *, name: str | None = None) -> RunFolder:
    """A run with the text in every name and message; `name`, without a slash, in those of files."""
    name = text if name is None else name
    # A configuration holds no NUL and no half surrogate pair, and ${...} is a reference in it.
    plain = text.encode(errors="ignore").decode().replace("\0", "")
    setting = json.dumps(plain.replace("${", "$ {"))
    run = empty_run(
        folder / name, f"trainer.policy.model.path={setting}", f"data.train_data=[{setting}]"
    )
    both = [episode_with_text(text, won=True), episode_with_text(text, won=False)]
    key = both[0].task_key
    group = Group(task_key=key, env_key=key, trajectories=tuple(both))
    add_training(run, 1, [group])
    add_evaluation(run, name, 0, [group])
    add_evaluation(run, name, 1, [group])
    add_rows(run, [{"step": 1, f"sentinel/{text}": 1.0}], [{"step": 1, f"timing/{text}": 1.0}])
    return run
