from __future__ import annotations

from pathlib import Path

import pytest

from skyfleet.config.keys import diff, dump_yaml, explain, flatten, keys_page, known_keys
from skyfleet.config.loading import load_config
from skyfleet.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "skyrl_keys.md"


def test_a_key_is_explained_with_its_bounds_default_and_other_spelling() -> None:
    assert explain("generator.inference_engine.gpu_memory_utilization") == (
        "generator.gpu_memory_utilization: float, above 0, at most 1 = 0.8\n"
        "Also spelled generator.inference_engine.gpu_memory_utilization."
    )
    assert explain("generator.max_input_length") == (
        "generator.max_input_length: int, at least 1 = ${trainer.max_prompt_length}\n"
        "Tokens; an episode ends before a turn whose prompt is longer. 512 if "
        "trainer.max_prompt_length is unset."
    )


def test_a_section_lists_its_keys_with_their_meanings_and_nothing_lists_all() -> None:
    assert explain("trainer.algorithm.kl_ctrl").splitlines() == [
        "trainer.algorithm.kl_ctrl.type: fixed | adaptive = fixed",
        "trainer.algorithm.kl_ctrl.kl_target: float, above 0 = 0.1",
        "    Target of the adaptive coefficient: the KL per token.",
        "trainer.algorithm.kl_ctrl.horizon: int, at least 1 = 10000",
        "    Sequences over which the adaptive coefficient reacts; more than a fifth of those of a step.",
    ]
    keys = [line for line in explain().splitlines() if not line.startswith(" ")]
    assert len(keys) == len(known_keys())


def test_a_misspelt_section_is_answered_with_the_section() -> None:
    with pytest.raises(ConfigError, match=r"did you mean trainer\.algorithm\?"):
        explain("trainer.algoritm")


def test_an_unsupported_key_is_explained_and_an_unknown_one_is_an_error() -> None:
    assert explain("trainer.flash_attn").startswith("trainer.flash_attn has no effect: ")
    assert explain("trainer.policy.model.lora.init_method").endswith(
        "runs with kaiming; otherwise: use kaiming"
    )
    assert explain("trainer.mtp.enabled").startswith("trainer.mtp.enabled is not supported: ")
    with pytest.raises(ConfigError, match=r"trainer\.sead is unknown; did you mean trainer\.seed"):
        explain("trainer.sead")


def test_a_configuration_is_flat_and_its_yaml_loads_as_itself() -> None:
    config = load_config(
        "",
        ["trainer.rope_scaling.factor=4", "generator.chat_template_kwargs={a: {b: 1}}"],
    )
    flat = flatten(config)
    assert flat["trainer.rope_scaling.factor"] == 4.0
    assert flat["generator.chat_template_kwargs"] == {"a": {"b": 1}}
    assert flat["trainer.policy.optimizer_config.adam_betas"] == [0.9, 0.999]
    assert load_config(dump_yaml(config)) == config


def test_a_difference_names_both_values() -> None:
    one = load_config()
    other = load_config("", ["trainer.seed=1", "trainer.rope_scaling.factor=2"])
    assert diff(one, one) == {}
    differences = diff(one, other)
    assert differences["trainer.seed"] == (42, 1)
    assert differences["trainer.rope_scaling.factor"] == (None, 2.0)


def test_a_secret_is_never_shown() -> None:
    config = load_config("", ["environment.skyrl_gym.fleet_task.api_key=sk-123"])
    assert "sk-123" not in dump_yaml(config) + str(flatten(config)) + repr(config)


def test_the_page_of_keys_is_what_the_code_says() -> None:
    writer = "from skyfleet.config.keys import write_keys_page"
    assert PAGE.read_text(encoding="utf-8") == keys_page(), (
        f"docs/skyrl_keys.md is stale; run: python -c "
        f"\"{writer}; from pathlib import Path; write_keys_page(Path('docs/skyrl_keys.md'))\""
    )
