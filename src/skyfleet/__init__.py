"""skyfleet: train language-model agents by reinforcement learning, with evidence.

>>> import skyfleet as sf
>>> def press(state: dict, times: int) -> str:
...     "Press the button."
...     state["n"] += times
...     return f"pressed {state['n']} times"
>>> env = sf.ToolEnv(
...     tools=[press],
...     setup=lambda task: {"n": 0},
...     reward=lambda task, state: float(state["n"] == task["times"]),
... )
>>> sf.rollout("null", env, {"prompt": "Press the button 3 times.", "times": 3}).reward
0.0

The names below are the public API and follow semantic versioning; docs/python_api.md describes
them. They are imported when they are first used, so `import skyfleet` is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyfleet.algorithms.losses.loss import LossInputs as LossInputs
    from skyfleet.algorithms.losses.loss import LossOutput as LossOutput
    from skyfleet.algorithms.sample import Sample as Sample
    from skyfleet.api.comparison import Comparison as Comparison
    from skyfleet.api.comparison import Evaluation as Evaluation
    from skyfleet.api.comparison import compare as compare
    from skyfleet.api.custom_algorithms import estimator as estimator
    from skyfleet.api.custom_algorithms import loss as loss
    from skyfleet.api.envs import AgentEnv as AgentEnv
    from skyfleet.api.envs import env as env
    from skyfleet.api.evaluation import evaluate as evaluate
    from skyfleet.api.evaluation import evaluate_async as evaluate_async
    from skyfleet.api.evaluation import rollout as rollout
    from skyfleet.api.evaluation import rollout_async as rollout_async
    from skyfleet.api.policy import Policy as Policy
    from skyfleet.api.policy import load_policy as load_policy
    from skyfleet.api.runs import Run as Run
    from skyfleet.api.runs import load_run as load_run
    from skyfleet.api.serving import Server as Server
    from skyfleet.api.serving import serve as serve
    from skyfleet.api.settings import CISPO as CISPO
    from skyfleet.api.settings import DAPO as DAPO
    from skyfleet.api.settings import GRPO as GRPO
    from skyfleet.api.settings import GSPO as GSPO
    from skyfleet.api.settings import PPO as PPO
    from skyfleet.api.settings import RLOO as RLOO
    from skyfleet.api.settings import Algorithm as Algorithm
    from skyfleet.api.settings import LoRA as LoRA
    from skyfleet.api.settings import Sampling as Sampling
    from skyfleet.api.tables import Table as Table
    from skyfleet.api.tasks import split as split
    from skyfleet.api.trainer import Trainer as Trainer
    from skyfleet.api.training import TrainResult as TrainResult
    from skyfleet.api.training import train as train
    from skyfleet.api.training import train_async as train_async
    from skyfleet.api.trajectories import Trajectories as Trajectories
    from skyfleet.api.trajectories import Trajectory as Trajectory
    from skyfleet.chat.message import Message as Message
    from skyfleet.envs.python_env import Env as Env
    from skyfleet.envs.python_env import ToolEnv as ToolEnv
    from skyfleet.envs.python_episode import Observation as Observation
    from skyfleet.envs.python_episode import Step as Step
    from skyfleet.envs.python_tools import tool as tool
    from skyfleet.envs.tools import ToolError as ToolError
    from skyfleet.errors import ConfigError as ConfigError
    from skyfleet.errors import NothingGradedError as NothingGradedError
    from skyfleet.errors import SkyfleetError as SkyfleetError
    from skyfleet.errors import TaskError as TaskError
    from skyfleet.tasks.task import Grade as Grade
    from skyfleet.tasks.task import Task as Task
    from skyfleet.trainer.callbacks import STOP as STOP
    from skyfleet.trainer.callbacks import StepResult as StepResult

    __version__: str

_MODULES = {
    "algorithms.losses.loss": ("LossInputs", "LossOutput"),
    "algorithms.sample": ("Sample",),
    "api.comparison": ("Comparison", "Evaluation", "compare"),
    "api.custom_algorithms": ("estimator", "loss"),
    "api.envs": ("AgentEnv", "env"),
    "api.evaluation": ("evaluate", "evaluate_async", "rollout", "rollout_async"),
    "api.policy": ("Policy", "load_policy"),
    "api.runs": ("Run", "load_run"),
    "api.serving": ("Server", "serve"),
    "api.settings": (
        *("Algorithm", "CISPO", "DAPO", "GRPO", "GSPO", "PPO", "RLOO"),
        *("LoRA", "Sampling"),
    ),
    "api.tables": ("Table",),
    "api.tasks": ("split",),
    "api.trainer": ("Trainer",),
    "api.training": ("TrainResult", "train", "train_async"),
    "api.trajectories": ("Trajectories", "Trajectory"),
    "chat.message": ("Message",),
    "envs.python_env": ("Env", "ToolEnv"),
    "envs.python_episode": ("Observation", "Step"),
    "envs.python_tools": ("tool",),
    "envs.tools": ("ToolError",),
    "errors": ("ConfigError", "NothingGradedError", "SkyfleetError", "TaskError"),
    "tasks.task": ("Grade", "Task"),
    "trainer.callbacks": ("STOP", "StepResult"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("skyfleet")
    if name not in _HOMES:
        raise AttributeError(f"module 'skyfleet' has no attribute {name!r}")
    value = getattr(import_module(f"skyfleet.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
