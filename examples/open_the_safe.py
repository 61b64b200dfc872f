"""An environment as a class, trained step by step: `python examples/open_the_safe.py [MODEL] [STEPS]`."""

from __future__ import annotations

import sys
from typing import Any

import skyfleet as sf


class Safe(sf.Env):
    """The agent finds a number from 1 to 20; the dial says whether it is too low or too high."""

    def __init__(self, task: Any) -> None:
        self.secret, self.open = task["secret"], False

    def reset(self) -> sf.Observation:
        prompt = "Open the safe. Its number is from 1 to 20."
        return sf.Observation(prompt, tools=[self.turn_dial])

    def turn_dial(self, number: int) -> str:
        """Turn the dial to a number from 1 to 20."""
        if not 1 <= number <= 20:
            raise sf.ToolError(f"number is {number}; choose from 1 to 20")
        self.open = number == self.secret
        if self.open:
            return "The safe opens."
        return "Too low." if number < self.secret else "Too high."

    def grade(self) -> float:
        return float(self.open)


def main(model: str = "Qwen/Qwen3-0.6B", steps: str = "50") -> None:
    tasks = [{"prompt": f"Safe {n}.", "secret": n} for n in range(1, 21)]
    with sf.Trainer(
        model,
        Safe,
        tasks=tasks[:16],
        eval={"unseen": tasks[16:]},
        steps=int(steps),
        algorithm=sf.RLOO(group_size=4, kl=0.0),
        config={"generator.max_turns": 6},
    ) as trainer:
        for step in trainer:
            print(step.number, step.reward, step.groups[0].rewards)
            if step.reward == 1.0:
                break
        trainer.save()
    print(trainer.result)


if __name__ == "__main__":
    main(*sys.argv[1:])
