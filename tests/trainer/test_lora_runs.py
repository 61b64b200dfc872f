"""Training runs with LoRA adapters and with rope scaling, from configuration to checkpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.moody_world import open_moody
from tests.fakes.small_runs import rows, small_config
from tests.trainer.interrupting import interrupt_training
from transformers import PretrainedConfig

from skyfleet.cli.agents import find_policy_folder
from skyfleet.config.root import RunConfig
from skyfleet.config.warnings import find_warnings
from skyfleet.envs import registry
from skyfleet.envs.registry import env_factory
from skyfleet.errors import ConfigError, ModelError
from skyfleet.learner.factory import load_auxiliary_model
from skyfleet.models.loading import load_model
from skyfleet.trainer.load_policy import load_policy_model
from skyfleet.trainer.training_run import run_training

LORA = ("trainer.policy.model.lora.rank=4", "trainer.policy.model.lora.alpha=8")
BASE = (
    "trainer.policy.model_config_kwargs={}",
    "trainer.warm_start.steps=0",
    "trainer.policy_mini_batch_size=2",  # one update per step: the KL is that of its start
)


@pytest.fixture(autouse=True, scope="module")
def _moody() -> Iterator[None]:
    """Use an environment whose rewards differ within a group, so every step changes the weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.ENV_CLASSES, "world", lambda _: open_moody)
        yield


@pytest.fixture(scope="module")
def base(_moody: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy of a small run, used as a pretrained model."""
    folder = tmp_path_factory.mktemp("base")
    asyncio.run(run_training(small_config(folder, "trainer.max_training_steps=1")))
    return folder / "checkpoints" / "global_step_1" / "policy"


def lora_config(folder: Path, base: Path, *overrides: str) -> RunConfig:
    return small_config(folder, f"trainer.policy.model.path={base}", *BASE, *LORA, *overrides)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    loaded = load_model(
        str(folder), dtype=torch.float32, device=torch.device("cpu"), config_kwargs={}
    )
    return loaded.module.state_dict()


async def test_adapters_are_trained_saved_and_resumed(base: Path, tmp_path: Path) -> None:
    straight, broken = (lora_config(tmp_path / name, base) for name in ("straight", "broken"))
    await run_training(straight)
    await interrupt_training(broken, "skyfleet.trainer.rollouts:collect", call=3, loops=3)
    await run_training(broken)
    metrics = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("straight", "broken")]
    assert metrics[0] == metrics[1]
    steps = rows(tmp_path / "straight")
    assert steps[1]["policy/policy_kl"] == pytest.approx(0.0, abs=1e-6)  # the reference is the base
    assert steps[3]["policy/policy_kl"] > 0
    last = tmp_path / "straight" / "checkpoints" / "global_step_3" / "policy"
    described = json.loads((last / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(base)
    before, after = weights(base), weights(last)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {f"{name}.weight" for name in described["target_modules"]}


@pytest.mark.exhaustive
async def test_adapters_of_the_tiny_model_are_resumed_and_its_random_weights_stay(
    tmp_path: Path,
) -> None:
    overrides = (*LORA, "trainer.warm_start.steps=0", "trainer.eval_interval=-1")
    straight, broken = (
        small_config(tmp_path / name, *overrides) for name in ("straight", "broken")
    )
    assert [w for w in find_warnings(straight) if "adapts the random weights" in w]
    await run_training(straight)
    await interrupt_training(broken, "skyfleet.trainer.rollouts:collect", call=3, loops=3)
    await run_training(broken)
    metrics = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("straight", "broken")]
    assert metrics[0] == metrics[1]
    before, after = (
        weights(tmp_path / "straight" / "checkpoints" / f"global_step_{step}" / "policy")
        for step in (0, 3)
    )
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(name.endswith("proj.weight") for name in moved)


async def test_a_checkpoint_with_adapters_is_evaluated_like_any_other(
    base: Path, tmp_path: Path
) -> None:
    config = lora_config(tmp_path, base, "trainer.max_training_steps=1")
    await run_training(config)
    folder = find_policy_folder(config, None)
    assert folder == tmp_path / "checkpoints" / "global_step_1" / "policy"
    policy_model = await load_policy_model(config, [], env_factory(config), policy_folder=folder)
    held, saved = policy_model.loaded.module.state_dict(), weights(folder)
    assert held.keys() == saved.keys()
    assert all(torch.equal(held[name], saved[name]) for name in saved)


async def test_after_a_warm_start_the_reference_is_the_warm_started_policy(
    base: Path, tmp_path: Path
) -> None:
    overrides = ("trainer.warm_start.steps=2", "trainer.max_training_steps=1")
    await run_training(lora_config(tmp_path, base, *overrides))
    assert rows(tmp_path)[1]["policy/policy_kl"] == pytest.approx(0.0, abs=1e-6)
    initial = weights(tmp_path / "checkpoints" / "global_step_0" / "policy")
    assert not torch.equal(
        initial["model.layers.0.mlp.up_proj.weight"],
        weights(base)["model.layers.0.mlp.up_proj.weight"],
    )


async def test_a_changed_base_model_is_an_error_on_resume(base: Path, tmp_path: Path) -> None:
    own = Path(copytree(base, tmp_path / "base"))
    await run_training(lora_config(tmp_path / "run", own, "trainer.max_training_steps=1"))
    file = own / "model.safetensors"
    changed = load_file(file)
    changed["model.layers.0.mlp.up_proj.weight"][3] *= 1.1
    save_file(changed, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj.weight differs from .* restore the base model"):
        await run_training(lora_config(tmp_path / "run", own))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("lora.rank=0", r"was trained with LoRA adapters, but trainer.policy.model.lora.rank=0"),
        ("lora.rank=2", r"trainer.policy.model.lora.rank=2, but the adapters in .* have rank=4"),
        (
            "lora.alpha=16",
            r"trainer.policy.model.lora.alpha=16, but the adapters in .* have alpha=8",
        ),
    ],
)
async def test_resuming_adapters_with_other_lora_keys_is_refused(
    base: Path, tmp_path: Path, change: str, sentence: str
) -> None:
    await run_training(lora_config(tmp_path / "run", base, "trainer.max_training_steps=1"))
    resume_overrides = (
        "trainer.resume_mode=from_path",
        f"trainer.resume_path={tmp_path / 'run' / 'checkpoints' / 'global_step_1'}",
        f"trainer.policy.model.{change}",
    )
    with pytest.raises(ModelError, match=sentence) as caught:
        await run_training(lora_config(tmp_path / "other", base, *resume_overrides))
    assert "\n" not in str(caught.value)


YARN = "{rope_type: yarn, factor: 2.0, original_max_position_embeddings: 1100}"


@pytest.mark.parametrize(
    "spelling",
    [
        f"trainer.rope_scaling={YARN}",
        f"trainer.policy.model_config_kwargs={{rope_parameters: {YARN}}}",
    ],
)
async def test_the_policys_rope_scaling_applies_to_the_reference_model(
    base: Path, tmp_path: Path, spelling: str
) -> None:
    other = Path(copytree(base, tmp_path / "other"))
    overrides = (f"trainer.policy.model.path={base}", *BASE, spelling)
    config = small_config(tmp_path, *overrides, f"trainer.ref.model.path={other}")
    policy_model = await load_policy_model(config, [], env_factory(config))
    module = load_auxiliary_model(config, policy_model, str(other), key="trainer.ref.model.path")
    for read in (policy_model.loaded.module.config, module.config):
        assert isinstance(read, PretrainedConfig)
        assert read.max_position_embeddings == 2200
        assert read.rope_parameters["rope_type"] == "yarn"


async def test_a_run_with_rope_scaling_trains_and_saves_its_config(
    base: Path, tmp_path: Path
) -> None:
    rope_scaling = (
        "trainer.rope_scaling.factor=2",
        "trainer.rope_scaling.original_max_position_embeddings=1100",
        "generator.max_input_length=2000",
        "trainer.max_training_steps=1",
        f"trainer.policy.model.path={base}",
    )
    await run_training(small_config(tmp_path, *BASE, *rope_scaling))
    saved = tmp_path / "checkpoints" / "global_step_1" / "policy" / "config.json"
    config = json.loads(saved.read_text())
    assert config["max_position_embeddings"] == 2200
    assert config["rope_parameters"]["rope_type"] == "yarn"
    row = rows(tmp_path)[1]
    assert row["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
    assert row["policy/policy_kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["trainer.rope_scaling.factor=2"], r"rope_scaling extends the context of a trained"),
        (["trainer.rope_scaling.factor=1"], r"trainer.rope_scaling.factor=1: it takes .*above 1"),
        (["trainer.rope_scaling.rope_type=ntk"], r"rope_type='ntk': it takes yarn"),
        (
            ["trainer.policy.model.lora.init_method=pissa"],
            r"='pissa' is not supported: use kaiming",
        ),
        (
            [
                "trainer.policy.model.path=m",
                "trainer.rope_scaling.factor=2",
                "trainer.policy.model_config_kwargs={rope_parameters: {factor: 2}}",
            ],
            r"both extend the context; keep one",
        ),
    ],
)
def test_invalid_lora_and_rope_scaling_settings_are_refused(
    tmp_path: Path, overrides: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        small_config(tmp_path, *overrides)
