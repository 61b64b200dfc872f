"""What vLLM is started with and asked for, and what is refused before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.engines.vllm_controller import VllmSettings, check_version, engine_args
from skyfleet.engines.vllm_engine import logprobs_of, open_vllm_engine, vllm_fields, vllm_finish
from skyfleet.errors import ConfigError, EngineError, MissingExtraError

SAMPLING = SamplingParams(
    max_generate_length=64, temperature=0.5, top_p=0.9, stop=("X",), stop_token_ids=(2,), seed=3
)
SETTINGS = VllmSettings(max_model_len=512, model_dtype="float32")
KNOWN = ("model", "max_model_len", "quantization", "hf_overrides")


@dataclass(slots=True, kw_only=True)
class Answer:
    token_ids: Sequence[int]
    logprobs: Any = None
    finish_reason: str | None = "stop"


def asked(sampling: SamplingParams, session: str = "t/0", position: int = 7) -> dict[str, Any]:
    return vllm_fields(sampling, session=session, position=position)


def test_only_stop_tokens_end_a_turn_in_vllm_itself() -> None:
    fields = asked(SAMPLING)
    assert (fields["ignore_eos"], fields["stop_token_ids"]) == (True, [2])
    assert (fields["max_tokens"], fields["temperature"], fields["top_p"]) == (64, 0.5, 0.9)
    assert "stop" not in fields


def test_the_whole_vocabulary_is_top_k_zero() -> None:
    assert asked(SAMPLING)["top_k"] == 0
    assert asked(replace(SAMPLING, top_k=5))["top_k"] == 5


def test_seed_session_and_position_decide_the_draws() -> None:
    seeds = {asked(SAMPLING, session, at)["seed"] for session in ("t/0", "t/1") for at in (7, 8)}
    assert len(seeds) == 4
    assert asked(SAMPLING)["seed"] == asked(SAMPLING)["seed"]
    assert asked(replace(SAMPLING, seed=None))["seed"] is None


def test_a_greedy_turn_is_certain() -> None:
    assert asked(SAMPLING)["logprobs"] == 0
    assert asked(replace(SAMPLING, temperature=0.0))["logprobs"] is None
    assert logprobs_of(Answer(token_ids=[4, 5])) == [0.0, 0.0]


def test_logprobs_are_the_chosen_tokens_own() -> None:
    flat = SimpleNamespace(logprobs=[-0.5, -1.5])
    assert logprobs_of(Answer(token_ids=[4, 5], logprobs=flat)) == [-0.5, -1.5]
    assert logprobs_of(Answer(token_ids=[], logprobs=flat, finish_reason="abort")) == []


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_how_a_turn_finished_is_kept(reason: str) -> None:
    assert vllm_finish(Answer(token_ids=[4], finish_reason=reason)) == reason


def test_a_turn_that_vllm_gave_up_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="finish_reason='error'"):
        vllm_finish(Answer(token_ids=[], finish_reason="error"))


def test_vllm_is_started_for_tokens_and_the_logprobs_that_were_sampled_with() -> None:
    arguments = engine_args("folder", SETTINGS, KNOWN)
    assert arguments["model"] == "folder"
    assert (arguments["logprobs_mode"], arguments["skip_tokenizer_init"]) == (
        "processed_logprobs",
        True,
    )
    assert (arguments["dtype"], arguments["enable_sleep_mode"]) == ("float32", False)
    assert engine_args("f", replace(SETTINGS, sleep_level=1), KNOWN)["enable_sleep_mode"] is True


def test_engine_init_kwargs_reach_vllm_as_they_are() -> None:
    rope = {"rope_parameters": {"factor": 4.0}}
    settings = replace(SETTINGS, engine_init_kwargs={"hf_overrides": rope})
    assert engine_args("folder", settings, KNOWN)["hf_overrides"] == rope


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"max_model_len": 9}, r"has \['max_model_len'\], which other keys decide"),
        ({"quantisation": "fp8"}, r"quantisation: vLLM has none such; did you mean quantization"),
        ({"zzz": 1}, r"zzz: vLLM has none such; leave it out"),
    ],
)
def test_what_vllm_would_misread_is_refused(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_args("folder", replace(SETTINGS, engine_init_kwargs=kwargs), KNOWN)


@pytest.mark.parametrize("version", ["0.23.0", "0.32.0", "0.23.1+cpu", "1.0"])
def test_a_vllm_that_can_is_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.9.2", "0.22.9", "0.23.0rc1", "dev"])
def test_a_vllm_that_cannot_is_refused_by_its_version(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"vLLM {version} is installed; it needs 0\.23 or newer"):
        check_version(version)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed")
async def test_without_vllm_the_extra_is_named() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install -e .\.\[train,vllm\]"):
        await open_vllm_engine("folder", SETTINGS, decode_text=str)
