"""AgentInfo: which agent an evaluation ran, and with which settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from skyfleet.redaction import redact


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentInfo:
    """Reports whose agents differ in more than the weights are not directly comparable."""

    agent: str = "policy"
    model: str | None = None
    """A model name or a folder; None for a scripted agent."""
    endpoint: str | None = None
    checkpoint: str | None = None
    """None for the base model and for a run that is still training."""
    step: int | None = None
    """The training step that a server reports; a checkpoint has it in its name."""
    temperature: float | None = None
    max_turns: int | None = None

    def __post_init__(self) -> None:
        """An endpoint may contain a password, and reports are shared."""
        for name in ("model", "endpoint", "checkpoint"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, redact(value))


def differences(before: AgentInfo, after: AgentInfo) -> list[str]:
    """One text per field that differs, such as `temperature: 0 before, 1 after`."""
    after_fields = asdict(after)
    return [
        f"{name}: {_format(value)} before, {_format(after_fields[name])} after"
        for name, value in asdict(before).items()
        if value != after_fields[name]
    ]


def _format(value: str | float | None) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)
