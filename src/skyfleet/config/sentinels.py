"""Sentinels: what happens when one finds something."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from skyfleet.config.section import Section


def _off(value: Any) -> Any:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


Mode = Annotated[Literal["stop", "warn", "off"], BeforeValidator(_off)]


class Sentinels(Section):
    mode: Mode = "stop"
    """stop ends the run at a broken promise and warns of a sign; warn only warns; off looks away."""
    modes: dict[str, Mode] = Field({})
    """Sentinel by name -> its own mode."""
