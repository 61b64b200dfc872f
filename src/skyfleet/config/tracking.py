"""Tracking: where a run's metrics, alerts and spans go besides its own folder."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr

from skyfleet.config.section import Section

Logger = Literal["console", "jsonl", "tensorboard", "wandb", "trackio", "mlflow"]


def list_wandb_keys(modality: str | None) -> list[str]:
    """The variables that hold W&B's API key for a modality, the first that is set counts."""
    own = [f"WANDB_API_KEY_{modality.upper()}"] if modality else []
    shared = ["WANDB_API_KEY_TOOL_USE"] if modality == "both" else []
    return [*own, *shared, "WANDB_API_KEY"]


class Wandb(Section):
    """The API key is WANDB_API_KEY_{MODALITY}, such as WANDB_API_KEY_TOOL_USE, or WANDB_API_KEY."""

    modality: str | None = None
    """tool_use, computer_use or both: chooses the API key, and from the mappings below. null reads the \
environment variable MODALITY."""
    entity: str | dict[str, str] | None = Field(None, union_mode="left_to_right")
    """A W&B team or user, or one per modality; null is the default of the API key."""
    project: str | dict[str, str] | None = Field(None, union_mode="left_to_right")
    """A W&B project, or one per modality; null is trainer.project_name."""


class Alerts(Section):
    """Start, verdicts, findings of sentinels and the end of a run, sent in the background."""

    slack_channel: str | None = Field(None, min_length=1)
    """A Slack channel, by id or by name without # (which begins a comment in YAML): one thread per run. \
Needs the environment variable SLACK_BOT_TOKEN."""
    webhook_url: SecretStr | None = None
    """Each alert is posted there as JSON. Write ${oc.env:NAME}; it is redacted in every output."""
    dollars_per_hour: float | None = Field(None, ge=0)
    """The price of the machine, for the cost in the last alert; null shows hours only."""


class Prometheus(Section):
    port: int | None = Field(None, ge=0, le=65535)
    """Serve the last row of metrics at http://host:port/metrics; null does not, 0 chooses a free port."""
    host: str = Field("127.0.0.1", min_length=1)
    """Another host than this machine, such as 0.0.0.0, needs a token: the environment variable \
SKYFLEET_API_KEY, which Prometheus sends as authorization."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Further names that a request's Host header may have."""
