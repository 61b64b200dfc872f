"""Open tau2's tasks as environments."""

from __future__ import annotations

import asyncio
from itertools import count

from skyfleet.chat.message import Message
from skyfleet.config.root import RunConfig
from skyfleet.envs.env import EnvFactory
from skyfleet.envs.tau.conversation import ConversationEnv
from skyfleet.envs.tau.v2_case import Tau2Case, read_history
from skyfleet.envs.tau.v2_package import DOMAINS, load_checkout, load_domain
from skyfleet.envs.tau.v2_tasks import convert_history, write_opening
from skyfleet.envs.tau.v2_users import ObedientUser, Tau2PackageUser
from skyfleet.envs.users.factory import build_user_factory
from skyfleet.envs.users.scenario import COLUMN, Scenario, read_scenario
from skyfleet.envs.users.user import User
from skyfleet.errors import EnvError
from skyfleet.tasks.task import Task


def build_factory(config: RunConfig) -> EnvFactory:
    """The domain is the row's; the user is the run's, or tau2's own simulator."""
    load_checkout()
    make_user = build_user_factory(config)
    section = config.environment.tau_bench
    sessions = count()

    async def open_tau2(task: Task) -> ConversationEnv:
        extra = task.metadata.get("extra_info") or {}
        name, task_id = str(extra.get("domain")), str(extra.get("task_id"))
        if name not in DOMAINS:
            raise EnvError(
                f"task {task.key}: metadata.extra_info.domain={name!r} is no domain of tau2; choose "
                f"from {', '.join(DOMAINS)}"
            )
        domain = load_domain(name)
        if task_id not in domain.tasks:
            raise EnvError(
                f"task {task.key}: tau2's {name} has no task {task_id!r}; list the tasks again, or use "
                "the version they are of"
            )
        package_task = domain.tasks[task_id]
        case = await asyncio.to_thread(Tau2Case, domain, package_task)
        user: User
        if section.package_user is not None:
            user = Tau2PackageUser(
                domain.package, section, case, package_task, read_history(package_task)
            )
        else:
            scenario = make_scenario(task, write_opening(package_task))
            user = make_user(scenario, f"{task.key}/{next(sessions)}")
            if domain.user_tools:
                user = ObedientUser(user, case, package_task.user_tools or domain.user_tools)
        greeting = Message(role="assistant", content=domain.package.greeting)
        history = convert_history(package_task) or [greeting]
        return ConversationEnv(task, case, user, history=history)

    return open_tau2


def make_scenario(task: Task, opening: str) -> Scenario:
    """The row's own scenario, or a user that says what it was instructed."""
    if COLUMN in task.metadata:
        return read_scenario(task)
    return Scenario(opening=opening, instruction=task.prompt)
