"""An engine with its own copy of the weights: where it loads them, when it sleeps, what it gets.

These tests do not need vLLM: a fake loads the same folder into an embedded engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes import moody_world
from tests.fakes.copied_engine import VLLM, Copied, happened, stand_for_vllm
from tests.fakes.small_runs import rows, small_config

from skyfleet.chat.transcript import Completion
from skyfleet.engines.engine import Engine
from skyfleet.engines.factory import check_gpus, vllm_settings
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs import registry
from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.learner.learner import Learner
from skyfleet.trainer import assemble, trackers
from skyfleet.trainer.policy_client import open_inference_client
from skyfleet.trainer.training_run import run_training
from skyfleet.weight_sync.sync import PausedSync

SHORT = ("trainer.max_training_steps=1", "trainer.warm_start.steps=1")
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1100}
ROPE_SCALING = f"trainer.rope_scaling={YARN}"


@pytest.fixture(autouse=True)
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_for_vllm(monkeypatch)
    monkeypatch.setitem(registry.ENV_CLASSES, "world", lambda _: moody_world.open_moody)


async def test_an_engine_that_shares_the_gpu_sleeps_during_learning(tmp_path: Path) -> None:
    await run_training(small_config(tmp_path, *VLLM))
    assert happened == ["start", *["sleep", "push", "wake"] * 4, "close"]  # warm start, 3 steps
    # The engine's logprobs match the learner's; a sentinel stops the run otherwise.
    gaps = [row["policy/rollout_train_logprobs_abs_diff_mean"] for row in rows(tmp_path)[1:]]
    assert len(gaps) == 3
    assert max(gaps) < 1e-4


async def test_engines_apart_from_the_learner_stay_awake_and_form_a_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = ("trainer.placement.colocate_all=false", "generator.num_inference_engines=2")
    push = PausedSync.push

    async def record_pause(self: PausedSync, learner: Learner, engines: Sequence[Engine]) -> int:
        happened.append("pause")
        return await push(self, learner, engines)

    monkeypatch.setattr(PausedSync, "push", record_pause)
    await run_training(small_config(tmp_path, *VLLM, *apart))
    assert happened == ["start", "start", *["pause", "push"] * 4, "close", "close"]


async def test_on_resume_the_engine_starts_from_the_checkpoint(tmp_path: Path) -> None:
    await run_training(small_config(tmp_path, *VLLM, "trainer.max_training_steps=2"))
    happened.clear()
    await run_training(small_config(tmp_path, *VLLM))
    assert happened == ["start", "sleep", "push", "wake", "close"]
    assert rows(tmp_path)[-1]["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-4


async def test_an_engine_is_closed_if_the_run_cannot_be_assembled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_disk_full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(trackers, "make_trackers", raise_disk_full)
    with pytest.raises(OSError, match="no space left"):
        await run_training(small_config(tmp_path, *VLLM))
    assert happened == ["start", "close"]


async def test_wrong_references_are_errors_before_an_engine_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_module"):
        await run_training(
            small_config(tmp_path, *VLLM, "trainer.algorithm.policy_loss_type=no_such_module:loss")
        )
    assert happened == []


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed")
async def test_a_missing_vllm_is_an_error_before_tasks_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(assemble, "load_run_tasks", None)
    with pytest.raises(MissingExtraError, match="vllm is not installed; it comes with the extra"):
        await run_training(small_config(tmp_path, *VLLM))


def test_vllm_gets_the_configured_settings(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        *VLLM,
        "generator.model_dtype=float32",
        "generator.enforce_eager=true",
        "generator.enable_prefix_caching=false",
        "generator.engine_init_kwargs={swap_space: 1}",
        "generator.gpu_memory_utilization=0.3",
    )
    settings = vllm_settings(config, learns=True)
    assert (settings.model_dtype, settings.enforce_eager) == ("float32", True)
    assert (settings.enable_prefix_caching, settings.gpu_memory_utilization) == (False, 0.3)
    assert settings.max_model_len == 1012  # 1,000 of prompt and 12 of the last turn
    assert settings.engine_init_kwargs == {"swap_space": 1}
    assert settings.max_num_seqs == 16
    assert settings.sleep_level == 0


async def test_the_engine_gets_weights_merged_with_the_adapters(tmp_path: Path) -> None:
    await run_training(small_config(tmp_path / "base", *VLLM, *SHORT))
    adapted = (
        f"trainer.policy.model.path={tmp_path}/base/checkpoints/global_step_1/policy",
        *("trainer.policy.model_config_kwargs={}", "trainer.policy.model.lora.rank=4"),
        # This check never runs with vLLM; the fake lets it run, and it would miss the adapters.
        "trainer.sentinels.modes.engine_weights=off",
    )
    # The engine accepts only the parameter names of a plain model.
    await run_training(small_config(tmp_path / "adapted", *VLLM, *adapted))
    assert rows(tmp_path / "adapted")[-1]["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-4


@pytest.mark.parametrize(
    ("changed", "from_folder"),
    [
        ((), True),
        (("trainer.policy.model_config_kwargs.max_position_embeddings=1200",), False),
        ((ROPE_SCALING,), False),
    ],
)
async def test_vllm_loads_an_unchanged_model_from_its_own_folder(
    tmp_path: Path, changed: tuple[str, ...], from_folder: bool
) -> None:
    await run_training(small_config(tmp_path, *VLLM, *SHORT))
    saved = f"{tmp_path}/checkpoints/global_step_1/policy"
    unchanged = "trainer.policy.model_config_kwargs={}"
    path = f"trainer.policy.model.path={saved}"
    async with open_inference_client(
        small_config(tmp_path, *VLLM, path, unchanged, *changed), None
    ) as policy_client:
        assert isinstance(policy_client.engine, Copied)
        assert (policy_client.engine.path == saved) == from_folder


async def test_vllm_loads_a_checkpoint_from_its_folder_unless_rope_scaling_changes_it(
    tmp_path: Path,
) -> None:
    await run_training(small_config(tmp_path, *VLLM, *SHORT))
    saved = tmp_path / "checkpoints/global_step_1/policy"
    from_checkpoint = (
        f"trainer.policy.model.path={saved}",
        "trainer.policy.model_config_kwargs={}",
    )
    plain = small_config(tmp_path, *VLLM, *from_checkpoint)
    rescaled = small_config(tmp_path, *VLLM, *from_checkpoint, ROPE_SCALING)
    for config, from_folder in ((plain, True), (rescaled, False)):
        async with open_inference_client(config, saved) as policy_client:
            assert isinstance(policy_client.engine, Copied)
            assert (policy_client.engine.path == str(saved)) == from_folder
    # The checkpoint as a run with rope scaling saves it.
    saved_config = json.loads((saved / "config.json").read_text())
    saved_config["rope_parameters"] |= YARN
    (saved / "config.json").write_text(json.dumps(saved_config))
    async with open_inference_client(rescaled, saved) as policy_client:
        assert isinstance(policy_client.engine, Copied)
        assert policy_client.engine.path == str(saved)


async def test_a_stop_string_is_found_across_an_aborted_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, sampling = [5, 6, 7], SamplingParams(max_generate_length=6, temperature=0)
    generate, parts = Copied.generate, 0

    async def abort_first(self: Copied, *args: Any, **kwargs: Any) -> Completion:
        nonlocal parts
        parts += 1
        completion = await generate(self, *args, **kwargs)
        if parts > 1:
            return completion
        return replace(
            completion,
            token_ids=completion.token_ids[:1],
            logprobs=completion.logprobs[:1],
            finish="abort",
        )

    await run_training(small_config(tmp_path, *VLLM, *SHORT))
    two = small_config(tmp_path, *VLLM, "generator.num_inference_engines=2")
    async with open_inference_client(
        two, tmp_path / "checkpoints/global_step_1/policy"
    ) as policy_client:
        free = (await policy_client.engine.generate(prompt, sampling, session="free")).token_ids
        stops = replace(sampling, stop=(policy_client.renderer.text(free[:2]),))
        monkeypatch.setattr(Copied, "generate", abort_first)
        completion = await policy_client.engine.generate(prompt, stops, session="cut")
    assert (completion.token_ids, completion.finish, parts) == (free[:2], "stop", 2)


def test_only_an_engine_that_shares_a_gpu_with_a_learner_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shared = small_config(tmp_path, *VLLM)
    apart = small_config(tmp_path, *VLLM, "trainer.placement.colocate_all=false")
    assert vllm_settings(shared, learns=True).sleep_level == 2
    assert vllm_settings(shared, learns=False).sleep_level == 0
    assert vllm_settings(apart, learns=True).sleep_level == 0


async def test_training_on_a_gpu_takes_one_engine_on_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = small_config(tmp_path, *VLLM, "generator.num_inference_engines=2")
    split = small_config(tmp_path, *VLLM, "generator.inference_engine_tensor_parallel_size=2")
    check_gpus(two, learns=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(assemble, "load_run_tasks", None)
    refused = r"training uses one vLLM engine on one GPU; set both to 1"
    for config in (two, split):
        with pytest.raises(ConfigError, match=refused):
            await run_training(config)
    with pytest.raises(ConfigError, match=refused):
        check_gpus(two, learns=False)
    check_gpus(split, learns=False)
    check_gpus(small_config(tmp_path, *VLLM), learns=True)
