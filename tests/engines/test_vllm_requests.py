"""Arguments and sampling parameters that vLLM gets, and settings that are rejected before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.engines.vllm_controller import VllmSettings, check_version, engine_args
from skyfleet.engines.vllm_engine import (
    open_vllm_engine,
    parse_finish,
    parse_logprobs,
    vllm_fields,
)
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


def fields(sampling: SamplingParams, session: str = "t/0", position: int = 7) -> dict[str, Any]:
    return vllm_fields(sampling, session=session, position=position)


def test_vllm_itself_matches_stop_tokens_only() -> None:
    sent = fields(SAMPLING)
    assert (sent["ignore_eos"], sent["stop_token_ids"]) == (True, [2])
    assert (sent["max_tokens"], sent["temperature"], sent["top_p"]) == (64, 0.5, 0.9)
    assert "stop" not in sent


def test_the_whole_vocabulary_is_top_k_zero() -> None:
    assert fields(SAMPLING)["top_k"] == 0
    assert fields(replace(SAMPLING, top_k=5))["top_k"] == 5


def test_seed_session_and_position_determine_the_request_seed() -> None:
    seeds = {fields(SAMPLING, session, at)["seed"] for session in ("t/0", "t/1") for at in (7, 8)}
    assert len(seeds) == 4
    assert fields(SAMPLING)["seed"] == fields(SAMPLING)["seed"]
    assert fields(replace(SAMPLING, seed=None))["seed"] is None


def test_a_greedy_turn_has_logprob_zero() -> None:
    assert fields(SAMPLING)["logprobs"] == 0
    assert fields(replace(SAMPLING, temperature=0.0))["logprobs"] is None
    assert parse_logprobs(Answer(token_ids=[4, 5])) == [0.0, 0.0]


def test_logprobs_are_those_of_the_sampled_tokens() -> None:
    flat = SimpleNamespace(logprobs=[-0.5, -1.5])
    assert parse_logprobs(Answer(token_ids=[4, 5], logprobs=flat)) == [-0.5, -1.5]
    assert parse_logprobs(Answer(token_ids=[], logprobs=flat, finish_reason="abort")) == []


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_the_finish_reason_is_kept(reason: str) -> None:
    assert parse_finish(Answer(token_ids=[4], finish_reason=reason)) == reason


def test_an_unknown_finish_reason_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="finish_reason='error'"):
        parse_finish(Answer(token_ids=[], finish_reason="error"))


def test_vllm_is_started_without_tokenizer_and_with_processed_logprobs() -> None:
    arguments = engine_args("folder", SETTINGS, KNOWN)
    assert arguments["model"] == "folder"
    assert (arguments["logprobs_mode"], arguments["skip_tokenizer_init"]) == (
        "processed_logprobs",
        True,
    )
    assert (arguments["dtype"], arguments["enable_sleep_mode"]) == ("float32", False)
    assert engine_args("f", replace(SETTINGS, sleep_level=1), KNOWN)["enable_sleep_mode"] is True


def test_engine_init_kwargs_are_passed_to_vllm_unchanged() -> None:
    rope = {"rope_parameters": {"factor": 4.0}}
    settings = replace(SETTINGS, engine_init_kwargs={"hf_overrides": rope})
    assert engine_args("folder", settings, KNOWN)["hf_overrides"] == rope


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"max_model_len": 9}, r"has \['max_model_len'\], which other keys set"),
        (
            {"quantisation": "fp8"},
            r"quantisation is not an argument of vLLM; did you mean quantization",
        ),
        ({"zzz": 1}, r"zzz is not an argument of vLLM; remove it"),
    ],
)
def test_invalid_engine_init_kwargs_are_rejected(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_args("folder", replace(SETTINGS, engine_init_kwargs=kwargs), KNOWN)


@pytest.mark.parametrize("version", ["0.23.0", "0.32.0", "0.23.1+cpu", "1.0"])
def test_a_supported_vllm_version_is_accepted(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.9.2", "0.22.9", "0.23.0rc1", "dev"])
def test_an_old_vllm_version_is_rejected(version: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"needs vLLM 0\.23 or newer, but {version} is installed"
    ):
        check_version(version)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed")
async def test_without_vllm_the_extra_is_named() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install -e .\.\[train,vllm\]"):
        await open_vllm_engine("folder", SETTINGS, decode_text=str)
