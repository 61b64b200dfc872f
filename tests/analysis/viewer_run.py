"""A run folder made by hand for the viewer: many plain episodes, one rich, one hostile."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from zlib import compress, crc32

from skyfleet.analysis.run_folder import open_run
from skyfleet.analysis.viewer.api import Viewer
from skyfleet.analysis.viewer.server import ViewerAccess, ViewerServer, open_viewer
from skyfleet.chat.message import Image, Message, Text, ToolCall
from skyfleet.chat.transcript import Transcript
from skyfleet.config.keys import dump_yaml
from skyfleet.config.loading import load_config
from skyfleet.tasks.task import Grade
from skyfleet.trajectories.archive import EpisodeWriter, eval_path, train_path
from skyfleet.trajectories.trajectory import Ending, Failure, Trajectory, Turn

RICH = "eval/unseen_tasks/40/0"
HOSTILE = "eval/hostile/40/0"
PAYLOAD = (
    "</script><script>window.broken=1;alert(1)</script>"
    '<img src=x onerror="window.broken=1;alert(2)"><svg onload="window.broken=1">'
    '"><iframe src="javascript:alert(3)"></iframe> javascript:alert(4) {{7*7}} ${7*7}'
)
WORDS = (
    *("<|im_start|>", "user", "\n", "Close", " it", "<|im_end|>"),
    *("<|im_start|>", "assistant", "\n", "I", " close", " the", " issue", "<|im_end|>"),
)
SYSTEM = """You work in github for eve. Call one tool a turn and read its answer before the next.

list_issues(repo): the open issues of a repository as CSV, with title, number and assignee.
get_issue(number): one issue with its body, labels and comments.
update_issue(number, state, assignee): changes what is given and leaves the rest as it is.
open_page(path, wait_ms): a screenshot of the page as a person would see it.

Change nothing that was not asked for. Say <done> when you have finished."""
DONE = Turn(
    action=Message(role="assistant", content="<done>"),
    replies=(),
    reward=0.0,
    engine_seconds=0.1,
)
_TEMPLATES = (
    ("github", "close_by_title"),
    ("booking", "move_day"),
    ("github", "assign_oldest"),
    ("booking", "cancel_trip"),
)


def write_run(folder: Path, *, plain: int = 300) -> Path:
    """Steps 1 and 40 of training, two evaluation sets, and a tokenizer."""
    run = folder / "night_run"
    run.mkdir()
    (run / "config.yaml").write_text(dump_yaml(load_config("", [])))
    for step in (1, 40):
        add_step(run, step, plain)
    write(eval_path(run / "trajectories", "unseen_tasks", 0), [early()])
    write(eval_path(run / "trajectories", "unseen_tasks", 40), [rich(), unknown()])
    write(eval_path(run / "trajectories", "hostile", 40), [hostile()])
    write_tokenizer(run / "checkpoints" / "global_step_40" / "policy")
    return run


def add_step(run: Path, step: int, count: int) -> None:
    """Four attempts per task; every third episode passes."""
    write(train_path(run / "trajectories", step), [plain_episode(n, step) for n in range(count)])


def write(path: Path, trajectories: list[Trajectory]) -> None:
    with EpisodeWriter(path) as writer:
        for trajectory in trajectories:
            writer.add(trajectory)


@contextmanager
def viewing(run: Path, *, access: ViewerAccess | None = None) -> Iterator[ViewerServer]:
    """A running viewer, until the block ends."""
    with open_viewer(Viewer(open_run(run)), access=access) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def plain_episode(number: int, step: int = 1) -> Trajectory:
    task = number // 4
    env_key, template = _TEMPLATES[task % len(_TEMPLATES)]
    won = number % 3 == 0
    text = f"Close the issue number {number} in maps."
    missing = number % 7 == 2 and not won
    answer = f"Error: no issue {number}" if missing else "ok"
    return _trajectory(
        task_key=f"{env_key}-{template}-{crc32(str(task).encode()):08x}",
        env_key=env_key,
        sample=number % 4,
        prompt=(Message(role="user", content=text),),
        turns=(
            called("list_issues", {"repo": "maps"}, "title,number\nupload freeze,2"),
            called("update_issue", {"number": number, "state": "closed"}, answer, error=missing),
            *(() if missing else (DONE,)),
        ),
        grade=Grade(reward=float(won), success=won),
        seconds=0.4 + step / 100,
    )


def early() -> Trajectory:
    """The rich episode's task at step 0: the same first action, then another."""
    wrong = called("update_issue", {"number": 8, "state": "closed"}, "ok", engine_seconds=0.41)
    turns = rich().turns
    return replace(
        rich(),
        turns=(turns[0], wrong, turns[-1]),
        grade=Grade(reward=0.0, success=False, explanation="[X] missing modify issues 2"),
    )


def rich() -> Trajectory:
    """Reasoning, an error, a malformed call, a screenshot, and a grade with parts."""
    screenshot = Message(
        role="tool",
        content=(Text("The issue is closed."), Image(png(480, 270))),
        tool_call_id="call_0",
    )
    look = called("open_page", {"path": "/maps/issues/2", "wait_ms": 9007199254740993}, "")
    return _trajectory(
        task_key="github-close_by_title-6a966fd2",
        env_key="github",
        prompt=(
            Message(role="system", content=SYSTEM),
            Message(role="user", content="Close the issue 'upload freeze' in maps."),
        ),
        turns=(
            called(
                "list_issues",
                {"repo": "maps"},
                "title,number,assignee\nupload freeze,2,eve\nlogin leak,8,carol",
                reasoning="I need the number first. The list has it.",
            ),
            called("update_issue", {"number": "two"}, "Error: number wants an integer", error=True),
            Turn(
                action=Message(role="assistant", malformed_calls=('{"name": "update_issue", ',)),
                replies=(Message(role="user", content="That call is not valid JSON."),),
                reward=0.0,
                engine_seconds=0.2,
            ),
            called("update_issue", {"number": 2, "state": "closed"}, "ok"),
            replace(look, replies=(screenshot,)),
            Turn(
                action=Message(role="assistant", content="The issue is closed. <done>"),
                replies=(),
                reward=1.0,
                engine_seconds=0.07,
            ),
        ),
        transcripts=(sampled_transcript(),),
        grade=Grade(
            reward=1.0,
            success=True,
            parts={"issue closed": 1.0, "nothing else changed": 1.0},
            explanation="[C] Exactly the expected changes were made",
        ),
        seconds=2.31,
    )


def unknown() -> Trajectory:
    return _trajectory(
        task_key="booking-move_day-0c11aa07",
        env_key="booking",
        prompt=(Message(role="user", content="Move my booking to Friday."),),
        turns=(called("move_booking", {"day": "Friday"}, "ok"),),
        failure=Failure(kind="VerifierError", detail="verifier: no table 'bookings'"),
    )


def hostile(text: str = PAYLOAD) -> Trajectory:
    """Markup in every field that a model or an environment can fill."""
    tried = called(text, {text: [text, {"deep": text}]}, text, reasoning=text)
    picture = Image(
        f"<svg xmlns='http://www.w3.org/2000/svg'>{text}</svg>".encode(errors="ignore"), text
    )
    return _trajectory(
        task_key=f"hostile-{text}",
        env_key=f"web {text}",
        prompt=(
            Message(role="system", content=text * 3),
            Message(role="user", content=(Text(text), picture)),
        ),
        turns=(
            tried,
            replace(
                tried,
                action=Message(role="assistant", content=text, malformed_calls=(text,)),
            ),
        ),
        transcripts=(sampled_transcript(),),
        grade=Grade(reward=0.0, success=False, parts={text: 0.0}, explanation=text),
        failure=Failure(kind="EnvError", detail=text),
    )


def sampled_transcript() -> Transcript:
    """Six prompt tokens, then eight sampled ones of decreasing probability."""
    chosen = [-0.01, -0.2, -1.0, -2.0, -4.0, -0.05, -0.6, -0.02]
    return Transcript(
        token_ids=[list(dict.fromkeys(WORDS)).index(word) for word in WORDS],
        loss_mask=[False] * 6 + [True] * 8,
        logprobs=[0.0] * 6 + chosen,
        policy_versions=[39],
    )


def called(
    name: str,
    arguments: dict[str, object],
    answer: str,
    *,
    error: bool = False,
    reasoning: str | None = None,
    engine_seconds: float = 0.38,
) -> Turn:
    call = ToolCall(id="call_0", name=name, arguments=arguments)
    return Turn(
        action=Message(role="assistant", reasoning=reasoning, tool_calls=(call,)),
        replies=(Message(role="tool", content=answer, tool_call_id="call_0", is_error=error),),
        reward=0.0,
        engine_seconds=engine_seconds,
        env_seconds=0.0002,
    )


def png(width: int, height: int) -> bytes:
    """A synthetic screenshot: a dark bar above grey lines."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    def shade(y: int) -> int:
        return 60 if y < 28 else 205 if y % 32 < 12 else 245

    rows = b"".join(b"\0" + bytes([shade(y)]) * width for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = (chunk(b"IHDR", header), chunk(b"IDAT", compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def write_tokenizer(folder: Path) -> None:
    """One word per token, in the format of `tokenizer.json`."""
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(WORDS))}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": WORDS[0]}
    parts: dict[str, object] = dict.fromkeys(
        ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    )
    folder.mkdir(parents=True)
    tokenizer = {"version": "1.0", **parts, "added_tokens": [], "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def _trajectory(
    *,
    task_key: str,
    env_key: str,
    prompt: tuple[Message, ...],
    sample: int = 0,
    turns: tuple[Turn, ...] = (),
    transcripts: tuple[Transcript, ...] = (),
    grade: Grade | None = None,
    failure: Failure | None = None,
    seconds: float = 1.0,
) -> Trajectory:
    return Trajectory(
        task_key=task_key,
        env_key=env_key,
        sample=sample,
        prompt=prompt,
        turns=turns,
        transcripts=transcripts,
        ending=Ending.DONE,
        grade=grade,
        failure=failure,
        seconds=seconds,
    )
