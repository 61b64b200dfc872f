"""Small packages in the layout of tau-bench and tau2: a shop with one kind of record.

They have the modules, classes and functions that the adapters use, with the same meaning.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyfleet.envs.tau import v1_case, v1_package, v2_case, v2_data, v2_package

_BASE = """
from tau_bench.envs.user import load_user
from tau_bench.types import Action


def to_hashable(item):
    if isinstance(item, dict):
        return tuple((key, to_hashable(value)) for key, value in sorted(item.items()))
    return tuple(map(to_hashable, item)) if isinstance(item, list) else item


class Env:
    def __init__(self, data_load_func, tools, tasks, wiki, rules, user_strategy, user_model,
                 user_provider=None, task_index=None):
        self.data = data_load_func()
        self.tools_map = {tool.get_info()["function"]["name"]: tool for tool in tools}
        self.tools_info = [tool.get_info() for tool in tools]
        self.terminate_tools = []
        self.tasks, self.task = tasks, tasks[task_index]
        self.wiki, self.rules, self.actions = wiki, rules, []
        self.user = load_user(user_strategy=user_strategy, model=user_model)

    def step(self, action):
        self.actions.append(action)
        if action.name not in self.tools_map:
            return Observed(f"Unknown action {action.name}")
        try:
            return Observed(self.tools_map[action.name].invoke(data=self.data, **action.kwargs))
        except Exception as error:
            return Observed(f"Error: {error}")


class Observed:
    def __init__(self, observation):
        self.observation = observation
"""
_USER = """
from litellm import completion


class Person:
    def __init__(self, model):
        self.model = model

    def reset(self, instruction):
        return f"{self.model}: {instruction}"

    def step(self, content):
        if content == "fail":
            completion(model=self.model)
        return "###STOP###" if content == "bye" else f"you said {content}"


def load_user(user_strategy, model, provider=None):
    return Person(model)
"""
_TYPES = """
from pydantic import BaseModel


class Action(BaseModel):
    name: str
    kwargs: dict


class Task(BaseModel):
    user_id: str
    actions: list[Action]
    instruction: str
    outputs: list[str]
"""
_TOOLS = """
def make(name, parameters, function):
    info = {"name": name, "description": f"{name}.", "parameters": {
        "type": "object", "properties": {one: {"type": "string"} for one in parameters},
        "required": parameters}}
    return type(name, (), {"invoke": staticmethod(function),
                           "get_info": staticmethod(lambda: {"type": "function", "function": info})})


def get_order(data, order_id):
    return str(data["orders"][order_id]["status"])


def cancel_order(data, order_id):
    if data["orders"][order_id]["status"] != "pending":
        return "Error: order is not pending"
    data["orders"][order_id]["status"] = "cancelled"
    return "cancelled"


ALL_TOOLS = [
    make("get_order", ["order_id"], get_order),
    make("cancel_order", ["order_id"], cancel_order),
    make("calculate", ["expression"], lambda data, expression: str(eval(expression))),
    make("transfer_to_human_agents", ["summary"], lambda data, summary: "Transfer successful"),
]
"""
_ENV = """
from tau_bench.envs.base import Env
from tau_bench.envs.{domain}.data import load_data
from tau_bench.envs.{domain}.tools import ALL_TOOLS
from tau_bench.types import Action, Task


def action(name, **kwargs):
    return Action(name=name, kwargs=kwargs)


TASKS = [
    Task(user_id="ann", instruction="You are Ann. Cancel order 1.", outputs=[],
         actions=[action("get_order", order_id="1"), action("cancel_order", order_id="1")]),
    Task(user_id="bob", instruction="You are Bob. You ask for the total.", outputs=["1200"],
         actions=[action("get_order", order_id="9")]),
    Task(user_id="eve", instruction="You are Eve. You only talk.", outputs=[],
         actions=[action("transfer_to_human_agents", summary="talk")]),
]


class DomainEnv(Env):
    def __init__(self, user_strategy, user_model, task_split, task_index=None, user_provider=None):
        super().__init__(load_data, ALL_TOOLS, TASKS, "Be polite.", [], user_strategy, user_model,
                         task_index=task_index)
        self.terminate_tools = ["transfer_to_human_agents"]
"""
_DATA = """
import json
from pathlib import Path


def load_data():
    return {"orders": json.loads((Path(__file__).parent / "orders.json").read_text())}
"""
ORDERS = '{"1": {"status": "pending", "price": 10}, "2": {"status": "delivered", "price": 5.0}}'


@contextmanager
def tau_bench_checkout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    files = {
        "__init__.py": "",
        "types.py": _TYPES,
        "envs/__init__.py": "",
        "envs/base.py": _BASE,
        "envs/user.py": _USER,
    }
    for domain in ("retail", "airline"):
        files |= {
            f"envs/{domain}/__init__.py": "",
            f"envs/{domain}/env.py": _ENV.format(domain=domain),
            f"envs/{domain}/tools/__init__.py": _TOOLS,
            f"envs/{domain}/data/__init__.py": _DATA,
            f"envs/{domain}/data/orders.json": ORDERS,
        }
    _write(folder / "tau_bench", files)
    monkeypatch.setenv("TAU_BENCH_PATH", str(folder))
    with forgetting_packages():
        yield folder


_MESSAGE = """
from pydantic import BaseModel


class ToolCall(BaseModel):
    id: str = ""
    name: str
    arguments: dict
    requestor: str = "assistant"


class Written(BaseModel):
    role: str
    content: str | None = None
    tool_calls: list[ToolCall] | None = None


class AssistantMessage(Written): ...


class UserMessage(Written): ...


class ToolMessage(BaseModel):
    id: str
    role: str = "tool"
    content: str
    requestor: str = "assistant"
    error: bool = False
"""
_TASKS = """
from enum import Enum

from pydantic import BaseModel


class RewardType(str, Enum):
    DB = "DB"
    ENV_ASSERTION = "ENV_ASSERTION"
    ACTION = "ACTION"
    COMMUNICATE = "COMMUNICATE"
    NL_ASSERTION = "NL_ASSERTION"


class Action(BaseModel):
    requestor: str = "assistant"
    name: str
    arguments: dict = {}


class Criteria(BaseModel):
    actions: list[Action] | None = None
    env_assertions: list[str] | None = None
    communicate_info: list[str] | None = None
    nl_assertions: list[str] | None = None
    reward_basis: list[RewardType] = [RewardType.DB, RewardType.COMMUNICATE]


class Scenario(BaseModel):
    instructions: str

    def __str__(self):
        return f"Instructions: {self.instructions}"


class Task(BaseModel):
    id: str
    user_scenario: Scenario
    user_tools: list[str] | None = None
    initial_state: None = None
    evaluation_criteria: Criteria
"""
_DOMAIN = """
import litellm
from litellm import completion
from pydantic import BaseModel, ConfigDict

from tau2.data_model.message import ToolMessage
from tau2.data_model.tasks import Action, Criteria, RewardType, Scenario, Task

litellm.drop_params = True


class Order(BaseModel):
    status: str
    price: float


class ShopDB(BaseModel):
    model_config = ConfigDict(extra="forbid")
    orders: dict[str, Order]


class PhoneDB(BaseModel):
    plugged: bool = False


class Spec:
    def __init__(self, name, parameters):
        self.name = name
        properties = {one: {"type": "string"} for one in parameters}
        self.openai_schema = {"function": {"name": name, "description": name, "parameters": {
            "type": "object", "properties": properties, "required": parameters}}}


class Tools:
    def __init__(self, db):
        self.db = db

    def tool_mutates_state(self, name):
        return name != "get_order"

    def get_order(self, order_id):
        return self.db.orders[order_id].status

    def cancel_order(self, order_id):
        self.db.orders[order_id].status = "cancelled"
        return "cancelled"


class UserTools:
    def __init__(self, db):
        self.db = db

    def plug_in(self):
        self.db.plugged = True
        return "plugged in"


class Environment:
    def __init__(self, db, user_db):
        self.tools, self.user_tools = Tools(db), UserTools(user_db)

    def get_policy(self):
        return "Be polite."

    def get_tools(self):
        return [Spec("get_order", ["order_id"]), Spec("cancel_order", ["order_id"])]

    def get_user_tools(self, include=None):
        return [Spec("plug_in", [])]

    def set_state(self, initialization_data, initialization_actions, message_history):
        pass

    def make_tool_call(self, tool_name, requestor="assistant", **arguments):
        kit = self.user_tools if requestor == "user" else self.tools
        return getattr(kit, tool_name)(**arguments)

    def get_response(self, call):
        try:
            text = self.make_tool_call(call.name, requestor=call.requestor, **call.arguments)
        except Exception as error:
            return ToolMessage(id=call.id, content=f"Error: {error}", error=True)
        return ToolMessage(id=call.id, content=text, requestor=call.requestor)

    def run_env_assertion(self, assertion, raise_assertion_error):
        if assertion == "missing":
            raise ValueError("no such record")
        return self.user_tools.db.plugged


def get_environment(db=None, user_db=None):
    orders = {"1": Order(status="pending", price=10)}
    return Environment(db or ShopDB(orders=orders), user_db or PhoneDB())


def task(id, **criteria):
    return Task(id=id, user_scenario=Scenario(instructions=f"You want {id}."),
                evaluation_criteria=Criteria(**criteria))


CANCEL = Action(name="cancel_order", arguments={"order_id": "1"})
PLUG = Action(requestor="user", name="plug_in")


def get_tasks(split):
    return [
        task("cancel", actions=[CANCEL], communicate_info=["10.50"]),
        task("plug", actions=[PLUG], env_assertions=["plugged"],
             reward_basis=[RewardType.ENV_ASSERTION, RewardType.ACTION]),
        task("judged", actions=[CANCEL], nl_assertions=["The agent is kind."],
             reward_basis=[RewardType.DB, RewardType.NL_ASSERTION]),
        task("gone", actions=[], env_assertions=["missing"], reward_basis=[RewardType.ENV_ASSERTION]),
    ]


def get_tasks_split():
    return {"base": [one.id for one in get_tasks(None)]}
"""
_EVALUATOR = """
class Found:
    def __init__(self, met):
        self.reward = 1.0 if met else 0.0


class {name}:
    @classmethod
    def calculate_reward(cls, task, full_trajectory):
        return Found(cls.check(task.evaluation_criteria, full_trajectory))

    @staticmethod
    def check(criteria, messages):
{check}
"""
_COMMUNICATE = """\
        texts = [one.content for one in messages if one.role == "assistant" and one.content]
        return all(any(info in text for text in texts) for info in criteria.communicate_info or [])
"""
_ACTION = """\
        calls = [call for one in messages for call in getattr(one, "tool_calls", None) or []]
        made = [(call.name, call.arguments) for call in calls]
        return all((one.name, one.arguments) in made for one in criteria.actions or [])
"""
_SIMULATOR = '''
from tau2.data_model.message import ToolCall, UserMessage


class UserSimulator:
    """Plugs its phone in when it is told to, and says what the tool returned."""

    def __init__(self, llm, instructions, tools=None):
        self.llm, self.instructions = llm, instructions

    def get_init_state(self, message_history):
        return list(message_history)

    def generate_next_message(self, message, state):
        text = message.content
        if text == "fail":
            raise RuntimeError("the model is gone")
        if text == "plug it in":
            calls = [ToolCall(id="u1", name="plug_in", arguments={}, requestor="user")]
            return UserMessage(role="user", tool_calls=calls), state
        if text == "bye":
            return UserMessage(role="user", content="###TRANSFER###"), state
        return UserMessage(role="user", content=f"{self.llm} heard {text}"), state
'''


@contextmanager
def tau2_checkout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    _write(
        folder / "src" / "tau2",
        {
            "__init__.py": "",
            "environment/environment.py": "",
            "data_model/message.py": _MESSAGE,
            "data_model/tasks.py": _TASKS,
            "agent/llm_agent.py": 'SYSTEM_PROMPT = "{agent_instruction} {domain_policy}"\n'
            'AGENT_INSTRUCTION = "Help."\n',
            "orchestrator/orchestrator.py": "from tau2.data_model.message import AssistantMessage\n"
            "DEFAULT_FIRST_AGENT_MESSAGE = AssistantMessage(role='assistant', content='Hi!')\n",
            "user/user_simulator.py": _SIMULATOR,
            "evaluator/evaluator_action.py": _EVALUATOR.format(
                name="ActionEvaluator", check=_ACTION
            ),
            "evaluator/evaluator_communicate.py": _EVALUATOR.format(
                name="CommunicateEvaluator", check=_COMMUNICATE
            ),
            "domains/mock/environment.py": _DOMAIN,
        },
    )
    data = folder / "data" / "tau2" / "domains" / "mock"
    _write(data, dict.fromkeys(v2_data._REQUIRED["mock"], ""))
    monkeypatch.setenv("TAU2_PATH", str(folder))
    monkeypatch.delenv("TAU2_DATA_DIR", raising=False)
    with forgetting_packages():
        yield folder


@contextmanager
def forgetting_packages() -> Iterator[None]:
    """Start and end without what was loaded from a checkout."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] in ("tau_bench", "tau2")]:
        del sys.modules[module]
    for cached in (
        v1_package.load_checkout,
        v1_package.load_domain,
        v2_package.load_checkout,
        v2_package.load_package,
        v2_package.load_domain,
        v2_data.find_data_folder,
    ):
        cached.cache_clear()
    v1_case._expected.clear()
    v2_case._expected.clear()


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
