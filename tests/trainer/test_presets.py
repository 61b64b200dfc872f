"""The presets load, run in this version, and have the numbers they document."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyfleet.config.keys import diff, value_at
from skyfleet.config.loading import load_config, load_config_file
from skyfleet.config.root import RunConfig
from skyfleet.config.validation import find_unsupported_values, find_untrainable
from skyfleet.config.warnings import find_warnings
from skyfleet.trainer.tasks import check_disjoint, load_sources, load_training_tasks

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "src/skyfleet/presets").glob("*.yaml"))
RUN_NAMES = {
    *("generalise", "generalise_script", "generalise_plain", "generalise_script_plain"),
    *("local_tiny_cpu", "smollm2_135m", "smollm2_135m_cpu", "smollm2_135m_h200"),
    *("fleet_tool_use_qwen3_8b", "fleet_tool_use", "fleet_computer_use", "fleet_both"),
    *("qwen3_8b_8xh200", "qwen3_32b_8xh200", "qwen3_30b_a3b_8xh200"),
}
WORLD_PRESETS = [path for path in PRESETS if "world:" in path.read_text()]


def preset(name: str) -> RunConfig:
    return load_config_file(name)


def test_the_four_main_presets_exist() -> None:
    expected = {"fleet_qwen3_8b", "generalise", "smollm2_h200", "tiny"}
    assert expected <= {path.stem for path in PRESETS}


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_has_no_unsupported_or_unused_value(path: Path) -> None:
    config = load_config_file(path)
    problems = [
        *find_unsupported_values(config),
        *find_untrainable(config),
        *find_warnings(config),
    ]
    if path.stem.endswith("_8xh200"):
        # Until the sharded learner reads trainer.strategy and trainer.placement.
        problems = [line for line in problems if "one process on one device" not in line]
    assert problems == []


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_starts_with_a_comment_and_names_its_run(
    path: Path,
) -> None:
    assert path.read_text().startswith("# ")
    assert load_config_file(path).trainer.run_name in RUN_NAMES


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_files_named_in_a_presets_comments_exist(path: Path) -> None:
    comments = " ".join(re.findall(r"#(.*)", path.read_text()))
    named = re.findall(r"[\w./-]+\.(?:md|txt|yaml|py)\b", comments)
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", WORLD_PRESETS, ids=lambda path: path.stem)
def test_a_presets_training_and_evaluation_tasks_are_disjoint(path: Path) -> None:
    config = load_config(re.sub(r"count=\d+", "count=3", path.read_text()))
    eval_sets = {name: load_sources(s, key=name) for name, s in config.data.eval_sets.items()}
    tasks = load_training_tasks(config)
    check_disjoint(tasks, eval_sets, allow=False)
    assert len(tasks) == 3 * len(config.data.train_data)


SECTION_16 = {
    "trainer.algorithm.kl_loss_coef": (0.001, 0.01, 0.001, 0.02),
    "trainer.policy.optimizer_config.lr": (1e-6, 5e-7, 5e-6, 3e-7),
    "trainer.policy.optimizer_config.weight_decay": (0.01, 0.05, 0.01, 0.05),
    "trainer.policy.optimizer_config.max_grad_norm": (1.0, 0.5, 1.0, 0.5),
    "trainer.policy.optimizer_config.num_warmup_steps": (0, 50, 100, 200),
    "trainer.algorithm.eps_clip_low": (0.2, 0.1, 0.2, 0.1),
    "trainer.algorithm.eps_clip_high": (0.2, 0.1, 0.2, 0.1),
    "trainer.algorithm.value_clip": (0.2, 0.1, 0.2, 0.1),
    "trainer.train_batch_size": (128, 64, 128, 64),
    "trainer.policy_mini_batch_size": (32, 16, 32, 16),
    "trainer.eval_batch_size": (64, 32, 64, 32),
    "trainer.eval_interval": (2, 3, 2, 3),
    "generator.n_samples_per_prompt": (3, 5, 3, 5),
    "generator.sampling_params.temperature": (0.7, 0.8, 1.0, 0.9),
    "generator.sampling_params.top_p": (0.9, 0.95, 0.9, 0.95),
}
"""Section 16 of the tau-bench recipe: the configuration before and after, the script before and after."""
GENERALISE = (
    *("generalise_plain", "generalise"),
    *("generalise_script_plain", "generalise_script"),
)


@pytest.mark.parametrize("key", SECTION_16)
def test_the_generalise_presets_have_both_columns_of_their_recipe_and_the_values_before(
    key: str,
) -> None:
    values = tuple(value_at(preset(name).model_dump(), key) for name in GENERALISE)
    assert values == SECTION_16[key]


@pytest.mark.parametrize(("plain", "regularised"), [GENERALISE[:2], GENERALISE[2:]])
def test_a_plain_twin_differs_in_the_recipes_values_only(plain: str, regularised: str) -> None:
    changed = set(diff(preset(plain), preset(regularised)))
    names = {f"trainer.{key}" for key in ("run_name", "run_path", "ckpt_path", "export_path")}
    # The learner follows the temperature, and the engine holds a whole step.
    follows = {"trainer.algorithm.temperature", "generator.max_num_seqs"}
    follows |= {"trainer.critic_mini_batch_size"}
    assert changed - names - follows == SECTION_16.keys()


def test_generalise_evaluates_every_held_out_environment() -> None:
    config = preset("generalise")
    held_out = " ".join(config.data.eval_sets["held_out_worlds"])
    assert all(f"world:{env}?" in held_out for env in config.data.held_out_envs)


def test_the_fleet_preset_has_fleets_batches_turns_and_lengths() -> None:
    config = preset("fleet_qwen3_8b")
    trainer, generator = config.trainer, config.generator
    assert (trainer.train_batch_size, generator.n_samples_per_prompt, trainer.epochs) == (24, 4, 20)
    assert (generator.max_turns, generator.max_input_length) == (50, 48000)
    assert generator.sampling_params.stop == ["</tool_call>"]


def test_the_h200_preset_changes_only_device_dtype_length_and_evaluation() -> None:
    changed = diff(preset("smollm2"), preset("smollm2_h200"))
    paths = {"run_name", "run_path", "ckpt_path", "export_path"}
    length = {"max_tokens_per_microbatch", "max_training_steps", "eval_interval"}
    keys = {f"trainer.{key}" for key in ({"device", "bf16"} | length | paths)}
    assert set(changed) == {"data.val_data", *keys}
