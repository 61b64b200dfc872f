"""`skyfleet presets`: list the configurations that ship with the package."""

from __future__ import annotations

from skyfleet.terminal import print


def presets_command() -> None:
    """List the presets; `skyfleet train NAME` runs one, `skyfleet config show NAME` prints it."""
    from skyfleet.presets import list_presets

    presets = list_presets()
    width = max(len(preset.name) for preset in presets)
    for preset in presets:
        print(f"{preset.name:{width}}  {preset.description}")
