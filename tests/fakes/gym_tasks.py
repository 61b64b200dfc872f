"""One task for each env of skyrl-gym, with what it needs around it and what solves it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from skyfleet.envs.skyrl_gym import SkyrlGymSettings
from skyfleet.tasks.task import Task

MAX_TURNS = 3
RLM = "skyrl_gym.envs.rlm.env:BaseRLMEnv"


@dataclass(frozen=True, slots=True, kw_only=True)
class GymCase:
    metadata: Mapping[str, Any]
    says: tuple[str, ...]
    """What solves it, turn by turn."""
    config: Mapping[str, Any] = field(default_factory=dict)


def _truth(answer: object) -> dict[str, Any]:
    return {"reward_spec": {"ground_truth": answer}}


CASES = {
    "aime": GymCase(metadata={"reward_model": {"ground_truth": "34"}}, says=("I add. Answer: 34",)),
    "gsm8k": GymCase(metadata=_truth("72"), says=("48 + 24 = 72\n#### 72",)),
    "gsm8k_multi_turn": GymCase(metadata=_truth("72"), says=("#### 70", "#### 72")),
    "text2sql": GymCase(
        metadata={"db_id": "shop", "data": "spider", **_truth("SELECT count(*) FROM items")},
        says=(
            "<think>Look.</think><sql>SELECT name FROM items</sql>",
            "<think>Count.</think><solution>SELECT count(name) FROM items</solution>",
        ),
        config={"db_path": "{folder}"},
    ),
    "search": GymCase(
        metadata=_truth({"target": ["Paris"]}),
        says=("<search>capital of France</search>", "<answer>Paris</answer>"),
        config={"search_url": "{url}", "topk": 1, "timeout": 5, "log_requests": False},
    ),
    "lcb": GymCase(
        metadata=_truth(json.dumps([{"input": "2 3", "output": "5", "testtype": "stdin"}])),
        says=("```python\na, b = map(int, input().split())\nprint(a + b)\n```",),
    ),
    "searchcode": GymCase(
        metadata=_truth("4"),
        says=("<tool><python>print(2 + 2)</python></tool>", "<solution>#### 4</solution>"),
    ),
    RLM: GymCase(
        metadata={},
        says=("```repl\nanswer = len(context)\n```", "```repl\nprint(answer)\n```\nFINAL(6)"),
    ),
}


@contextmanager
def gym_case(env_id: str, folder: Path) -> Iterator[tuple[SkyrlGymSettings, Task]]:
    """Settings and a task that work: a database in `folder`, a retrieval server that listens."""
    case = CASES[env_id]
    _write_shop(folder / "spider" / "database" / "shop" / "shop.sqlite")
    with _retrieval_server() as url:
        places = {"{folder}": str(folder), "{url}": url}
        settings = SkyrlGymSettings(
            env_id=env_id,
            max_turns=MAX_TURNS,
            env_config={key: places.get(value, value) for key, value in case.config.items()},
        )
        metadata = dict(case.metadata)
        yield settings, Task(key="t", env_key=env_id, prompt="Do it.", metadata=metadata)


def _write_shop(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as shop:
        shop.executescript(
            "CREATE TABLE IF NOT EXISTS items (name TEXT); DELETE FROM items;"
            "INSERT INTO items VALUES ('pen'), ('ink');"
        )


class _Retrieval(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = [{"document": {"contents": f"{asked['query']}: Paris"}}] * asked["topk"]
        answer = json.dumps({"result": [found]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def _retrieval_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Retrieval) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/retrieve"
        finally:
            server.shutdown()
            thread.join()
