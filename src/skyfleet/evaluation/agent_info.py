"""Player: who played, and how; two reports of different players compare more than the players."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentInfo:
    agent: str = "policy"
    model: str | None = None
    """A name or a folder; None for a scripted agent."""
    endpoint: str | None = None
    checkpoint: str | None = None
    """None: the model as it is, or a run that is still training."""
    step: int | None = None
    """The one that a server tells; a checkpoint's is in its name."""
    temperature: float | None = None
    max_turns: int | None = None


def differences(before: AgentInfo, after: AgentInfo) -> list[str]:
    """`temperature: 0 before, 1 after`, for each that is not the same."""
    after_fields = asdict(after)
    return [
        f"{name}: {_shown(one)} before, {_shown(after_fields[name])} after"
        for name, one in asdict(before).items()
        if one != after_fields[name]
    ]


def _shown(value: str | float | None) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)
