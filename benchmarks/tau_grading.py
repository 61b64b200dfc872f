"""Grading of tau-bench and tau2 beside the packages' own: agreement on random end states, and seconds.

    python -m benchmarks.tau_grading --states 1000 --full 20 tau_bench:retail tau2:telecom

An end state is that of a reference with calls left out, repeated, or taken from other tasks, with
arguments of theirs. The packages hash databases: every state is judged by their hash function against
the hash of their own reference replay, and `--full` states also by their whole evaluator, whose time is
the one compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from random import Random
from time import process_time
from typing import Any

from skyfleet.envs.tau import v1_package, v2_package
from skyfleet.envs.tau.sources import tau_tasks_from_source
from skyfleet.envs.tau.v1_case import TauBenchCase
from skyfleet.envs.tau.v1_tasks import find_package_task
from skyfleet.envs.tau.v2_case import Tau2Case, set_initial_state
from skyfleet.tasks.task import RecordedCall, Task

SUITES = ("tau_bench:retail", "tau_bench:airline", "tau2:retail", "tau2:airline", "tau2:telecom")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    ours: bool
    theirs: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """How one package judges the end state of calls."""

    judge: Callable[[Task, Sequence[RecordedCall]], Judged]
    judge_fully: Callable[[Task, Sequence[RecordedCall]], tuple[bool, bool, float]]
    """Ours, theirs, and the seconds of theirs."""


def draw_calls(task: Task, others: Sequence[RecordedCall], rng: Random) -> list[RecordedCall]:
    """The reference, changed in about two thirds of all draws."""
    calls = [call for call in task.solution if call.name != "respond"]
    if rng.random() < 0.35:
        return calls
    kept = [call for call in calls if rng.random() > 0.15]
    kept += [call for call in kept if rng.random() < 0.1]
    kept += rng.sample(others, k=rng.randint(0, 2))
    changed = []
    for call in kept:
        same = [one for one in others if one.name == call.name and one.arguments]
        if same and rng.random() < 0.1:
            arguments = dict(call.arguments)
            name, value = rng.choice(list(rng.choice(same).arguments.items()))
            call = RecordedCall(name=call.name, arguments=arguments | {name: value})
        changed.append(call)
    return changed


def open_tau_bench(domain_name: str) -> Suite:
    domain = v1_package.load_domain(domain_name)
    get_env = import_module("tau_bench.envs").get_env
    gold: dict[str, str] = {}

    def play(task: Task, calls: Sequence[RecordedCall]) -> tuple[TauBenchCase, Any]:
        package_task = find_package_task(task, domain)
        case = TauBenchCase(domain, package_task)
        for call in calls:
            if call.name not in domain.ending_tools:
                case.call(call.name, call.arguments)
        return case, package_task

    def judge(task: Task, calls: Sequence[RecordedCall]) -> Judged:
        case, package_task = play(task, calls)
        if task.key not in gold:
            env = domain.open(package_task)
            for action in package_task.actions:
                if action.name not in domain.ending_tools:
                    env.step(action)
            gold[task.key] = env.get_data_hash()
        case.grade()  # The reference is replayed once per task, not per state.
        start = process_time()
        grade = case.grade()
        seconds = process_time() - start
        return Judged(
            ours=bool(grade.parts["database"]),
            theirs=case._env.get_data_hash() == gold[task.key],
            seconds=seconds,
        )

    def judge_fully(task: Task, calls: Sequence[RecordedCall]) -> tuple[bool, bool, float]:
        case, _ = play(task, calls)
        extra = task.metadata["extra_info"]
        env = get_env(domain_name, "human", "none", extra["split"], task_index=extra["task_index"])
        env.data, env.actions = case._env.data, case._env.actions
        ours = case.grade().success
        start = process_time()
        reward = env.calculate_reward().reward
        return ours, reward == 1.0, process_time() - start

    return Suite(judge=judge, judge_fully=judge_fully)


def open_tau2(domain_name: str) -> Suite:
    domain = v2_package.load_domain(domain_name)
    evaluator = import_module("tau2.evaluator.evaluator_env").EnvironmentEvaluator
    gold: dict[str, tuple[str, str | None]] = {}

    def play(task: Task, calls: Sequence[RecordedCall]) -> tuple[Tau2Case, Any]:
        package_task = domain.tasks[task.metadata["extra_info"]["task_id"]]
        case = Tau2Case(domain, package_task)
        for call in calls:
            side = case.call_as_user if call.name in domain.user_tools else case.call
            side(call.name, call.arguments)
        return case, package_task

    def judge(task: Task, calls: Sequence[RecordedCall]) -> Judged:
        case, package_task = play(task, calls)
        environment = case.environment
        if task.key not in gold:
            reference = domain.open()
            set_initial_state(reference, package_task)
            for action in package_task.evaluation_criteria.actions or []:
                try:
                    reference.make_tool_call(
                        action.name, requestor=action.requestor, **action.arguments
                    )
                except Exception:
                    continue
            gold[task.key] = reference.get_db_hash(), reference.get_user_db_hash()
        case._check_databases()
        start = process_time()
        ours = case._check_databases()
        seconds = process_time() - start
        theirs = (environment.get_db_hash(), environment.get_user_db_hash()) == gold[task.key]
        return Judged(ours=ours, theirs=theirs, seconds=seconds)

    def judge_fully(task: Task, calls: Sequence[RecordedCall]) -> tuple[bool, bool, float]:
        case, package_task = play(task, calls)
        parts = case.grade().parts
        ours = all(parts[name] for name in ("DB", "ENV_ASSERTION") if name in parts)
        start = process_time()
        found = evaluator.calculate_reward(
            domain.environment.get_environment, package_task, case._trajectory
        )
        return ours, found.reward == 1.0, process_time() - start

    return Suite(judge=judge, judge_fully=judge_fully)


def list_calls(task: Task) -> list[RecordedCall]:
    """The reference's calls, the user's of tau2 included."""
    if task.env_class == "tau_bench":
        return [call for call in task.solution if call.name != "respond"]
    domain = v2_package.load_domain(task.metadata["extra_info"]["domain"])
    criteria = domain.tasks[task.metadata["extra_info"]["task_id"]].evaluation_criteria
    return [RecordedCall(name=one.name, arguments=one.arguments) for one in criteria.actions or []]


def measure(source: str, n_states: int, n_full: int) -> None:
    package, _, domain_name = source.partition(":")
    suite = (open_tau2 if package == "tau2" else open_tau_bench)(domain_name)
    tasks = [
        task.model_copy(update={"solution": tuple(list_calls(task))})
        for task in tau_tasks_from_source(source)
    ]
    others = [call for task in tasks for call in task.solution]
    rng = Random(source)
    draws = [(task := rng.choice(tasks), draw_calls(task, others, rng)) for _ in range(n_states)]
    judged = [suite.judge(*draw) for draw in draws]
    full = [suite.judge_fully(*draw) for draw in draws[:n_full]]
    equal = sum(one.ours == one.theirs for one in judged)
    equal_full = sum(ours == theirs for ours, theirs, _ in full)
    ours_ms = 1e3 * sum(one.seconds for one in judged) / n_states
    theirs_ms = 1e3 * sum(seconds for *_, seconds in full) / n_full
    print(
        f"| {source} | {n_states} | {sum(one.theirs for one in judged)} | {equal}/{n_states} | "
        f"{equal_full}/{n_full} | {ours_ms:.2f} | {theirs_ms:.0f} | {theirs_ms / ours_ms:.0f}x |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="*", default=SUITES)
    parser.add_argument("--states", type=int, default=1000)
    parser.add_argument("--full", type=int, default=20)
    arguments = parser.parse_args()
    print(
        "| suite | states | equal to the reference | same verdict by hash | same full verdict "
        "| ours, ms | the package's, ms | |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for source in arguments.sources:
        measure(source, arguments.states, arguments.full)


if __name__ == "__main__":
    main()
