"""CardProfile: what one kind of GPU does per second, as measured, fitted, published or assumed."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from skyfleet.errors import ConfigError
from skyfleet.simulation.workload import Workload

Source = Literal["measured", "fitted", "datasheet", "assumed"]
"""fitted: to measured tables. Only measured numbers were seen on the card as they are."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Number(_Record):
    value: float
    source: Source
    note: str
    """Where it comes from."""


class CardNumbers(_Record):
    memory_gib: Number
    memory_bandwidth: Number
    """Bytes per second; bandwidths of links are per GPU and direction."""
    matmul_flops: Number
    """FLOP per second of large matrix products in bfloat16."""
    decode_fixed_seconds: Number
    """Of a decoding step, beside reading weights and KV cache."""
    prefill_share: Number
    """Of matmul_flops; so are the next four."""
    train_dense_share: Number
    train_lora_share: Number
    train_moe_share: Number
    train_attention_share: Number
    intranode_bandwidth: Number
    internode_bandwidth: Number
    collective_share: Number
    """Of a link's bandwidth that collectives reach."""
    collective_seconds: Number
    """Of a collective without data."""
    host_bandwidth: Number
    """Between a GPU and its machine's memory."""
    sleep_seconds: Number
    """Of engines on the learner's GPUs: to free the memory and to take it back."""
    push_fixed_seconds: Number
    turn_seconds: Number
    """Of the Python process that plays an episode."""
    fixed_token_seconds: Number
    """Metrics, checks and the log of a step, per token."""


class CardProfile(_Record):
    kind: Literal["card"] = "card"
    name: str
    gpus_per_node: int
    backend: Literal["vllm"]
    """Of the engines whose decoding was measured."""
    models: dict[str, str]
    """Path -> what is known of it on this card."""
    numbers: CardNumbers
    workload: Workload
    """Unless another is given."""

    def list_numbers(self, *sources: Source) -> dict[str, Number]:
        return {
            name: number
            for name in CardNumbers.model_fields
            for number in [getattr(self.numbers, name)]
            if number.source in sources
        }


def list_card_profiles() -> list[str]:
    folder = files("skyfleet.presets") / "profiles"
    return sorted(
        file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json")
    )


def read_card_profile(name: str) -> CardProfile:
    """A stored profile by its name, or a file."""
    known = list_card_profiles()
    if name in known:
        text = (files("skyfleet.presets") / "profiles" / f"{name}.json").read_text("utf-8")
    elif Path(name).is_file():
        text = Path(name).read_text("utf-8")
    else:
        raise ConfigError(
            f"--profile {name}: no profile of this card is stored; use {', '.join(known)}, or a file "
            "that `skyfleet plan CONFIG --measure` wrote on the card"
        )
    try:
        return CardProfile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"--profile {name}: {place}: {first['msg']}; correct the file") from None


def check_model(profile: CardProfile, path: str) -> str:
    """What is known of the model on the card; ConfigError if nothing is."""
    if path not in profile.models:
        raise ConfigError(
            f"trainer.policy.model.path={path!r} has no costs in the profile of {profile.name}, which "
            f"has {', '.join(profile.models)}; measure it there with `skyfleet plan CONFIG --measure`"
        )
    return profile.models[path]
