"""BFCL by category: accepted answers that its checkers pass, and the score of a policy.

    python -m benchmarks.bfcl reference
    python -m benchmarks.bfcl smollm2 --count 5 simple_python multiple irrelevance

The reference sends the calls of an accepted answer in one message, and in conversations one per message.
"""

from __future__ import annotations

import argparse
import asyncio

import skyfleet as sf
from skyfleet.chat.message import Message, ToolCall
from skyfleet.envs.bfcl.env import open_bfcl
from skyfleet.envs.bfcl.package import list_categories, load_category
from skyfleet.envs.bfcl.tasks import bfcl_tasks, choose_answer
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.scripted_agents import oracle_policy
from skyfleet.tasks.task import Grade, RecordedCall, Task

LIMITS = Limits(max_turns=100, max_input_length=0, trajectory_timeout_seconds=60)


async def answer_with_reference(category: str, task: Task) -> Grade | None:
    if category.startswith("multi_turn"):
        return (await run_episode(task, open_bfcl, oracle_policy, LIMITS)).grade
    calls = choose_answer(load_category(category)[task.metadata["test_id"]])
    if category == "live_relevance":
        calls = [RecordedCall(name="any_call")]
    made = tuple(
        ToolCall(id=str(i), name=call.name, arguments=call.arguments)
        for i, call in enumerate(calls)
    )
    env = await open_bfcl(task)
    await env.reset()
    await env.step(Message(role="assistant", tool_calls=made))
    grade = await env.grade()
    await env.close()
    return grade


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="reference, or what sf.evaluate takes")
    parser.add_argument("categories", nargs="*")
    parser.add_argument("--count", type=int)
    parser.add_argument("--tokens", type=int, default=96)
    arguments = parser.parse_args()
    for category in arguments.categories or list_categories():
        tasks = bfcl_tasks(category, arguments.count)
        if arguments.model == "reference":
            found = [asyncio.run(answer_with_reference(category, task)) for task in tasks]
            passed = sum(grade is not None and grade.success for grade in found)
        else:
            evaluation = sf.evaluate(
                arguments.model,
                sf.env("bfcl"),
                tasks,
                baselines=False,
                config={
                    "generator.max_turns": 20,
                    "generator.max_input_length": 4000,
                    "generator.sampling_params.max_generate_length": arguments.tokens,
                    "generator.eval_sampling_params.max_generate_length": arguments.tokens,
                },
            )
            passed = round((evaluation.success_rate or 0.0) * len(tasks))
        print(f"| {category} | {len(tasks)} | {passed} |", flush=True)


if __name__ == "__main__":
    main()
