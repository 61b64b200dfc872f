"""The Python blocks of the API's design run as they are, with only the model replaced.

What a block leaves free is defined before it: tasks, a tool, a URL, and the bodies written as `...`.
"""

from __future__ import annotations

import webbrowser
from pathlib import Path
from string import ascii_lowercase, digits
from typing import Any

import httpx
import pytest

import skyfleet as sf

REWARD = """
import skyfleet as sf

def exact(task, answer) -> float:
    return float(answer.strip().endswith(task["solution"]))

result = sf.train("Qwen/Qwen3-0.6B", reward=exact, tasks=[{"prompt": q, "solution": a} for q, a in pairs], steps=100)
print(result.comparison)
"""

TOOLS = '''
def search(state, query: str, limit: int = 5) -> list[str]:
    """Search the notes."""            # name, signature and docstring become the tool; `state` is hidden from the agent
    return [n for n in state["notes"] if query in n][:limit]

env = sf.ToolEnv(
    tools=[search, sf.tool(archive, writes=True)],
    setup=lambda task: {"notes": list(task["notes"])},     # one state per episode
    reward=lambda task, state: float(task["expected"] not in state["notes"]),
    system_prompt="You keep the notes tidy.", max_turns=8,
)
'''

FULL_CONTROL = """
class Safe(sf.Env):                     # one instance per episode; sync or async methods; grade() and close() optional
    def __init__(self, task): ...
    def reset(self): return sf.Observation("Open the safe.", tools=[self.turn_dial])
    def turn_dial(self, number: int) -> str: ...
    def step(self, message): ...        # only if calling the tools is not enough
    def grade(self): return float(self.open)
"""

TRAINING = """
result = sf.train(
    model="Qwen/Qwen3-0.6B",            # name, folder, preset "tiny", a loaded transformers model, or an earlier result.policy
    env=env, tasks=train, eval={"unseen": held_out},
    algorithm=sf.GRPO(group_size=8, kl=0.001, clip=(0.2, 0.28)),
    sampling=sf.Sampling(temperature=1.0, max_tokens=256),
    lr=1e-6, batch_size=32, steps=200, eval_every=20,
    lora=sf.LoRA(rank=32), engine="auto", trackers=["wandb"], seed=42, run_dir="runs/notes",
    config={"trainer.algorithm.use_tis": True},             # anything else, by key; or a YAML path or preset to start from
)
result.comparison      # verdict table per evaluation set: prints in a terminal, renders in a notebook
result.metrics         # a table: .to_pandas(), .plot("reward/avg_raw_reward")
result.policy          # .generate(messages), .rollout(env, task), .save(path), .push_to_hub(name), .serve()
result.run             # the run folder: trajectories, reports, checkpoints
"""

STEPS = """
with sf.Trainer("tiny", env, tasks=train, steps=50) as trainer:
    for step in trainer:
        print(step.number, step.reward, step.groups[0].rewards)
        if step.metrics["policy/policy_entropy"] < 0.1:
            break
    trainer.evaluate(held_out); trainer.save()
"""

ALGORITHMS = """
@sf.estimator                      # scope="group" is the default
def leave_best_out(rewards): ...

@sf.loss(metrics=["clip_share"])
def my_loss(inputs: sf.LossInputs, *, clip: float = 0.2) -> sf.LossOutput: ...

sf.train(..., algorithm=sf.GRPO(advantage=leave_best_out, loss=my_loss(clip=0.1)))
"""

EVALUATION = """
before = sf.evaluate("Qwen/Qwen3-0.6B", env, tasks, attempts=4)
after = sf.evaluate("http://localhost:8000/v1", env, tasks, attempts=4)
print(sf.compare(before, after))
run = sf.load_run("runs/notes")
for t in run.trajectories(env="notes", passed=False, step="last"):
    t.show()
run.report().open(); run.view()
"""


def archive(state: dict[str, Any], note: str) -> str:
    """Archive a note."""
    state["notes"].remove(note)
    return f"{len(state['notes'])} notes left"


TASKS = [
    {
        "prompt": f"Archive the note about {topic}.",
        "notes": ["milk", topic],
        "expected": topic,
        "solution": [{"name": "archive", "arguments": {"note": topic}}],
    }
    for topic in (f"project {n}" for n in range(60))
]


def run_block(
    block: str, names: dict[str, Any], *, filled: tuple[str, ...] = (), url: str | None = None
) -> dict[str, Any]:
    """Run the block; `filled` replaces each `...` in turn. Returns the names it defines."""
    script = block.replace('"Qwen/Qwen3-0.6B"', '"tiny"')
    assert script.count(": ...") + script.count("(...") == len(filled)
    for text in filled:
        script = script.replace("...", text, 1)
    if url is not None:
        script = script.replace("http://localhost:8000/v1", url)
    found = {"sf": sf, **names}
    exec(compile(script, "block of the design", "exec"), found)
    return found


@pytest.fixture(autouse=True)
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that the block opens in a browser."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    addresses: list[str] = []
    monkeypatch.setattr(webbrowser, "open", addresses.append)
    return addresses


@pytest.fixture
def notes() -> dict[str, Any]:
    """The environment of the block about tools, and tasks for it."""
    env = run_block(TOOLS, {"archive": archive})["env"]
    train, held_out = sf.split(TASKS, eval_ratio=0.1)
    return {"env": env, "tasks": TASKS, "train": train, "held_out": held_out}


@pytest.mark.exhaustive
def test_a_reward_function_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [(f"What is {a} + {b}?", str(a + b)) for a in range(8) for b in range(8)]
    result = run_block(REWARD, {"pairs": pairs})["result"]
    assert result.step == 100
    assert "| held_out | env" in capsys.readouterr().out


def test_tools(notes: dict[str, Any]) -> None:
    assert sf.rollout("oracle", notes["env"], TASKS[0]).reward == 1.0
    assert sf.rollout("null", notes["env"], TASKS[0]).reward == 0.0
    played = sf.rollout("tiny", notes["env"], TASKS[0], sampling=sf.Sampling(max_tokens=4))
    assert played.messages[0].text == "You keep the notes tidy."


def test_full_control() -> None:
    bodies = (
        'self.secret, self.open = task["secret"], False',
        'self.open = number == self.secret; return "It opens." if self.open else "It stays shut."',
        "return super().step(message)",
    )
    safe = run_block(FULL_CONTROL, {}, filled=bodies)["Safe"]
    task = {"prompt": "Safe 7.", "secret": 7}
    task["solution"] = [{"name": "turn_dial", "arguments": {"number": 7}}]
    opened = sf.rollout("oracle", safe, task)
    assert (opened.reward, opened.messages[0].text) == (1.0, "Open the safe.")
    shut = sf.rollout("tiny", safe, task, sampling=sf.Sampling(max_tokens=4))
    assert shut.reward == 0.0


@pytest.mark.exhaustive
def test_training() -> None:
    # 51,200 episodes: prompts of one character give a small vocabulary, so chance ends turns early.
    tasks = [{"prompt": character} for character in ascii_lowercase + digits]
    env = sf.ToolEnv(reward=lambda answer: float("a" in answer))
    names = {"env": env, "train": tasks[:32], "held_out": tasks[32:]}
    result = run_block(TRAINING, names)["result"]
    assert result.step == 200
    assert "| unseen | notes" in str(result.comparison)
    assert len(result.metrics.to_pandas()) == 201
    assert result.metrics.plot("reward/avg_raw_reward")._repr_html_().startswith("<svg")
    assert result.policy.generate("Hello").role == "assistant"
    assert result.run.path == Path("runs/notes")
    assert list(Path("runs/notes/wandb").glob("offline-run-*"))


@pytest.mark.exhaustive
def test_training_step_by_step(notes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    trainer = run_block(STEPS, notes)["trainer"]
    assert trainer.result.step == 50
    assert "\n50 " in capsys.readouterr().out
    assert len(trainer.result.run.trajectories(eval_set="adhoc")) == len(notes["held_out"])
    assert 50 in trainer.result.run.checkpoints


@pytest.mark.slow
def test_algorithms_of_ones_own(notes: dict[str, Any]) -> None:
    bodies = (
        "return [reward - max(rewards) for reward in rewards]",
        "\n    ratio_T = (inputs.logprobs_T - inputs.old_logprobs_T).exp()"
        "\n    shares_T = ((ratio_T - 1).abs() > clip).float()"
        '\n    return sf.LossOutput(loss_T=-ratio_T * inputs.advantages_T, metrics_T={"clip_share": shares_T})',
        '"tiny", env, tasks=train, eval=False, steps=2, run_dir="own"',
    )
    run_block(ALGORITHMS, notes, filled=bodies)
    run = sf.load_run("own")
    assert run.metrics["policy/clip_share"][1:] == [0.0, 0.0]
    assert run.config["trainer.algorithm.policy_loss_kwargs"] == {"clip": 0.1}


@pytest.mark.slow
def test_evaluating_comparing_and_reading(
    notes: dict[str, Any], opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    small = sf.GRPO(group_size=2)
    held_out = notes["held_out"]
    trained = sf.train(
        "tiny", notes["env"], tasks=notes["train"], eval=held_out, steps=1, algorithm=small,
        sampling=sf.Sampling(max_tokens=8), run_dir="runs/notes",
    )  # fmt: skip
    with sf.serve(trained, port=0) as server:
        found = run_block(EVALUATION, {**notes, "tasks": held_out}, url=server.url)
    assert len(found["after"].trajectories) == 4 * len(held_out)
    printed = capsys.readouterr().out
    assert "| val | env" in printed
    assert "[user] Archive the note about project" in printed
    assert opened[0].endswith("/runs/notes/report.html")
    assert httpx.get(f"{opened[1]}api/run").json()["total"] > 0
