"""Open tau-bench's tasks as environments."""

from __future__ import annotations

import asyncio
from itertools import count

from skyfleet.config.root import RunConfig
from skyfleet.envs.env import EnvFactory
from skyfleet.envs.tau.conversation import ConversationEnv
from skyfleet.envs.tau.package_users import PackageUser
from skyfleet.envs.tau.v1_case import TauBenchCase
from skyfleet.envs.tau.v1_package import SPLITS, load_checkout, load_domain
from skyfleet.envs.tau.v1_tasks import find_package_task
from skyfleet.envs.users.factory import build_user_factory
from skyfleet.envs.users.scenario import COLUMN, Scenario, read_scenario
from skyfleet.envs.users.user import User
from skyfleet.errors import EnvError, TaskError
from skyfleet.tasks.task import Task


def build_factory(config: RunConfig) -> EnvFactory:
    """The domain is the row's; the user is the run's, or tau-bench's own simulator."""
    load_checkout()
    make_user = build_user_factory(config)
    section = config.environment.tau_bench
    sessions = count()

    async def open_tau_bench(task: Task) -> ConversationEnv:
        extra = task.metadata.get("extra_info") or {}
        name = extra.get("domain", task.env_key)
        if name not in SPLITS:
            raise EnvError(
                f"task {task.key}: tau-bench has no domain {name!r}; choose from {', '.join(SPLITS)}"
            )
        domain = load_domain(name)
        try:
            package_task = find_package_task(task, domain)
        except TaskError as error:
            raise EnvError(str(error)) from error
        user: User
        if section.package_user is not None:
            user = PackageUser.of_tau_bench(section, package_task.instruction)
        else:
            user = make_user(
                make_scenario(task, package_task.instruction), f"{task.key}/{next(sessions)}"
            )
        case = await asyncio.to_thread(TauBenchCase, domain, package_task)
        return ConversationEnv(task, case, user)

    return open_tau_bench


def make_scenario(task: Task, instruction: str) -> Scenario:
    """The row's own scenario, or a user that says the instruction and confirms what it is asked."""
    if COLUMN in task.metadata:
        return read_scenario(task)
    return Scenario(opening=instruction, instruction=instruction)
