"""Train a model to call a tool: `python examples/press_the_button.py [MODEL] [STEPS]`."""

from __future__ import annotations

import sys
from typing import Any

import skyfleet as sf


def press(state: dict[str, int], times: int) -> str:
    """Press the button."""
    state["n"] += times
    return f"pressed {state['n']} times"


def pressed_right(task: Any, state: dict[str, int]) -> float:
    return float(state["n"] == task["times"])


def main(model: str = "Qwen/Qwen3-0.6B", steps: str = "50") -> None:
    env = sf.ToolEnv(tools=[press], setup=lambda task: {"n": 0}, reward=pressed_right, max_turns=4)
    tasks = [{"prompt": f"Press the button {n} times.", "times": n} for n in range(1, 65)]
    result = sf.train(
        model,
        env,
        tasks=tasks[:48],
        eval=tasks[48:],
        algorithm=sf.GRPO(group_size=8),
        lr=1e-6,
        steps=int(steps),
    )
    print(result.comparison)
    result.policy.rollout(env, tasks[0]).show()


if __name__ == "__main__":
    main(*sys.argv[1:])
