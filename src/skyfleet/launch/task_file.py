"""Task files: a run as SkyPilot's YAML, for `skyfleet launch` and for plain `sky launch FILE`."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from skyfleet.errors import ConfigError
from skyfleet.launch.secrets import SecretNames

MODALITIES = ("tool_use", "computer_use", "both")
SCRIPTS = "src/skyfleet/launch/scripts"
DRAIN_SECONDS = 900
DEFAULT_VARIABLES: Mapping[str, str] = {
    "MODALITY": "tool_use",
    "CONFIG": "",
    "OVERRIDES": "",
    "RUN_NAME": "",
    "RESUME_RUN_NAME": "",
    "GIT_COMMIT": "",
    "DATASET": "fleet",
    "DATA_VERSION": "v0.2",
    "TASKS_JSON": "",
    "ENV_KEY": "",
    "DIFFICULTY": "all",
    "MAX_TASKS": "",
    "EVAL_RATIO": "",
    "AWS_REGION": "us-east-1",
    "AWS_ENDPOINT_URL": "",
    "FLEET_BASE_URL": "",
    "WANDB_BASE_URL": "",
    "HF_ENDPOINT": "",
    "S3_DATASET_BUCKET": "fleet-internal-datasets",
    "S3_CHECKPOINT_BUCKET": "skyrl-checkpoints",
    "S3_TRAJECTORY_BUCKET": "skyrl-trajectories",
    "LOGGER": "console,wandb",
    "SLACK_CHANNEL": "fleet-training-runs",
    "DISABLE_SLACK": "false",
    "EXTRAS": "train,s3,slack,wandb",
    "CONSTRAINTS": "constraints.txt",
    "OPENENV_REPOSITORY": "https://github.com/fleet-ai/OpenEnv",
    "OPENENV_COMMIT": "009c1ed",
    "MAX_RESTARTS": "3",
    "PREFLIGHT": "1",
    "DOLLARS_PER_HOUR": "",
}
"""Every variable that the scripts read, with the value that a task file has if nobody sets it."""

_HEADER = """\
# A SkyPilot task: {title}
# From the root of a clone, with your keys in the environment:
#   sky launch FILE{names} --env MODALITY={modality} -d -y
# or, with retries, a generated run name and the clouds' credentials: skyfleet launch FILE
# See docs/launching.md. The file holds the names of secrets and no values.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTask:
    resources: Mapping[str, Any]
    secret_names: SecretNames
    variables: Mapping[str, str]
    """Values instead of those in DEFAULT_VARIABLES."""
    num_nodes: int = 1


def generate_run_name(modality: str) -> str:
    """`fleet_{modality}_{8 hex}`."""
    return f"fleet_{modality}_{secrets.token_hex(4)}"


def check_run_name(name: str) -> str:
    """It is also the name of the cluster, whose rule is SkyPilot's."""
    if not re.fullmatch(r"[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?", name):
        raise ConfigError(
            f"run name {name!r}: start with a letter, end with a letter or a digit, and use only "
            "letters, digits, _, . and -"
        )
    return name


def build_task(task: LaunchTask) -> dict[str, Any]:
    """The task as plain data, in the order in which a person reads it."""
    variables = {**DEFAULT_VARIABLES, **task.variables}
    # SkyPilot refuses a null variable that --env does not set; an empty one is optional.
    names: dict[str, str | None] = dict.fromkeys(task.secret_names.required)
    names |= dict.fromkeys(task.secret_names.optional, "")
    return {
        "name": variables["RUN_NAME"] or f"fleet_{variables['MODALITY']}",
        "resources": dict(task.resources),
        "num_nodes": task.num_nodes,
        "workdir": ".",
        "envs": {**names, **variables},
        "setup": f"bash {SCRIPTS}/setup.sh\n",
        # exec: SIGTERM reaches the script, and not an interactive shell that ignores it.
        "run": f"exec bash {SCRIPTS}/run.sh\n",
        "config": {
            "hooks": [
                {
                    "run": f"DRAIN_SECONDS={DRAIN_SECONDS} bash ~/sky_workdir/{SCRIPTS}/drain.sh\n",
                    "events": ["stop", "preemption", "down"],
                    "timeout": DRAIN_SECONDS + 60,
                }
            ]
        },
    }


def render_task(built: Mapping[str, Any], title: str) -> str:
    """The YAML text of a task file."""
    envs: Mapping[str, str | None] = built["envs"]
    names = "".join(f" --env {name}" for name, value in envs.items() if value is None)
    header = _HEADER.format(title=title, names=names, modality=envs["MODALITY"])
    return header + yaml.dump(dict(built), Dumper=_Dumper, sort_keys=False, width=100)


class _Dumper(yaml.SafeDumper):
    """YAML with scripts as blocks, and lists indented."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def join_overrides(overrides: Sequence[str]) -> str:
    """One per line, as run.sh reads them."""
    for override in overrides:
        if "\n" in override:
            raise ConfigError(f"{override!r} has a line break; write the value on one line")
    return "\n".join(overrides)
