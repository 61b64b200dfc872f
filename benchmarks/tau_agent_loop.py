"""tau-bench's own agent loop, unmodified, and `sf.evaluate`, of one policy that `sf.serve` serves.

    TAU_BENCH_PATH=... python -m benchmarks.tau_agent_loop --model smollm2 --domain airline --tasks 20

Both ask the same server with the same tools and at most `--turns` messages, and both talk to the same
scripted user. tau-bench's loop needs litellm, its evaluation none of skyfleet. The scores agree if each
is in the other's interval; with greedy sampling most tasks have the same verdict.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from importlib import import_module
from typing import Any

import skyfleet as sf
from skyfleet.envs.tau.v1_package import load_domain
from skyfleet.envs.tau.v1_tasks import tau_bench_tasks
from skyfleet.envs.users.scenario import Scenario
from skyfleet.envs.users.scripted import ScriptedUser
from skyfleet.envs.users.user import STOP, UserTurn
from skyfleet.metrics.intervals import wilson


class ScriptedSimulator:
    """Our scripted user in the shape of tau-bench's simulators."""

    def reset(self, instruction: str) -> str:
        self._user = ScriptedUser(Scenario(opening=instruction, instruction=instruction))
        return self._say(asyncio.run(self._user.open()))

    def step(self, content: str) -> str:
        return self._say(asyncio.run(self._user.reply(content)))

    def get_total_cost(self) -> float:
        return 0.0

    def _say(self, turn: UserTurn) -> str:
        return f"{turn.text} {STOP}" if turn.is_done else turn.text


def play_loop(server: Any, domain: str, split: str, n_tasks: int, turns: int) -> list[float]:
    os.environ |= {"OPENAI_API_BASE": server.url, "OPENAI_API_KEY": "none"}
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    load_domain(domain)
    agents = import_module("tau_bench.agents.tool_calling_agent")
    get_env = import_module("tau_bench.envs").get_env
    rewards = []
    for index in range(n_tasks):
        env = get_env(domain, "human", "none", split, task_index=index)
        env.user = ScriptedSimulator()
        agent = agents.ToolCallingAgent(
            tools_info=env.tools_info,
            wiki=env.wiki,
            model=server.name,
            provider="openai",
            temperature=0.0,
        )
        try:
            result = agent.solve(env=env, task_index=index, max_num_steps=turns)
            rewards.append(float(result.reward))
        except Exception as error:  # as in tau-bench's own run
            print(f"task {index}: {type(error).__name__}: {str(error)[:200]}")
            rewards.append(0.0)
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--domain", default="airline")
    parser.add_argument("--split", default="test")
    parser.add_argument("--tasks", type=int, default=50)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=8192, help="8192 of smollm2")
    arguments = parser.parse_args()
    # So that the modules of agents find tau_bench; `load_domain` imports only its environments.
    import_module("litellm")
    tasks = tau_bench_tasks(arguments.domain, arguments.split)[: arguments.tasks]
    config = {
        "generator.max_turns": arguments.turns,
        "generator.sampling_params.max_generate_length": arguments.tokens,
        "generator.eval_sampling_params.max_generate_length": arguments.tokens,
        "generator.max_input_length": arguments.context - arguments.tokens,
    }
    if arguments.model == "tiny":
        key = "trainer.policy.model_config_kwargs.max_position_embeddings"
        config[key] = arguments.context
    with sf.serve(arguments.model, port=0, name="policy", config=config) as server:
        theirs = play_loop(server, arguments.domain, arguments.split, len(tasks), arguments.turns)
        evaluation = sf.evaluate(
            server.url, sf.env("tau_bench", domain=arguments.domain), tasks, config=config
        )
    ours = [float(bool(evaluation.report.outcomes[task.key].rewards[0])) for task in tasks]
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    for name, rewards in (("tau-bench's loop", theirs), ("sf.evaluate", ours)):
        low, high = wilson(sum(rewards) / len(rewards), len(rewards))
        print(
            f"{name:18s} {sum(rewards):.0f}/{len(rewards)} ({100 * low:.1f} to {100 * high:.1f} %)"
        )
    print(f"same verdict: {same}/{len(tasks)}")
    print(evaluation)


if __name__ == "__main__":
    main()
