from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from pydantic import ValidationError

from skyfleet.config import loading
from skyfleet.config.generator import SamplingParams
from skyfleet.config.loading import (
    config_from_python,
    load_config,
    load_config_file,
    load_recorded_config,
    preset_names,
)
from skyfleet.config.root import RunConfig
from skyfleet.config.trainer import Trainer
from skyfleet.errors import ConfigError


def find_problems(text: str = "", *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(text, overrides)
    return str(caught.value).splitlines()


def test_an_empty_text_is_the_defaults() -> None:
    assert load_config() == RunConfig()


def test_an_override_wins_over_the_text_and_a_later_one_over_an_earlier() -> None:
    config = load_config("trainer: {seed: 1}", ["trainer.seed=2", "trainer.seed=3"])
    assert config.trainer.seed == 3


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_hydras_prefixes_change_nothing(prefix: str) -> None:
    assert load_config("", [f"{prefix}generator.max_turns=7"]).generator.max_turns == 7


def test_values_follow_yaml_and_an_exponent_is_a_number_even_without_a_point() -> None:
    config = load_config(
        "",
        [
            "trainer.policy.optimizer_config.lr=1e-6",
            "data.train_data=['a.parquet', 'b.json']",
            "trainer.policy.model_config_kwargs.rope_theta=1e6",
            "trainer.run_name=2026-08-01",
            "trainer.project_name=8e45abcd",
            "trainer.max_training_steps=null",
            "trainer.bf16=false",
        ],
    )
    assert config.trainer.policy.optimizer_config.lr == 1e-6
    assert config.data.train_data == ["a.parquet", "b.json"]
    assert config.trainer.policy.model_config_kwargs == {"rope_theta": 1_000_000.0}
    assert config.trainer.run_name == "2026-08-01"
    assert config.trainer.project_name == "8e45abcd"
    assert config.trainer.max_training_steps is None
    assert config.trainer.bf16 is False


@pytest.mark.parametrize("written", ["{enable_thinking: true}", "{enable_thinking:true}"])
def test_a_mapping_is_read_with_or_without_hydras_missing_space(written: str) -> None:
    config = load_config("", [f"+generator.chat_template_kwargs={written}"])
    assert config.generator.chat_template_kwargs == {"enable_thinking": True}


def test_a_mapping_merges_into_a_section() -> None:
    text = "generator: {sampling_params: {top_p: 0.5}}"
    config = load_config(text, ["generator.sampling_params={temperature: 0.7}"])
    assert config.generator.sampling_params.top_p == 0.5
    assert config.generator.sampling_params.temperature == 0.7


@pytest.mark.parametrize(
    ("overrides", "left"),
    [
        (["data.val_data={c: [z]}"], {"c": ["z"]}),
        (["data={val_data: {c: [z]}}"], {"c": ["z"]}),
        (["data.val_data.c=[z]"], {"a": ["x"], "b": ["y"], "c": ["z"]}),
        (["data.val_data.a=[z]"], {"a": ["z"], "b": ["y"]}),
        (["data.val_data={c: [z]}", "data.val_data.d=[w]"], {"c": ["z"], "d": ["w"]}),
        (["data.val_data.d=[w]", "data.val_data={c: [z]}"], {"c": ["z"]}),
        (["data.val_data={}"], {}),
    ],
)
def test_a_mapping_replaces_user_chosen_names_and_a_dotted_name_is_added(
    overrides: list[str], left: dict[str, list[str]]
) -> None:
    text = "data: {val_data: {a: [x], b: [y]}, train_data: [t]}"
    config = load_config(text, overrides)
    assert config.data.val_data == left
    assert config.data.train_data == ["t"]


def test_a_replaced_mapping_is_known_by_either_spelling_and_below_its_key() -> None:
    text = "generator: {inference_engine: {engine_init_kwargs: {a: {b: 1}, c: 2}, max_num_seqs: 9}}"
    key = "generator.inference_engine.engine_init_kwargs"
    whole = load_config(text, [f"{key}={{d: 3}}"]).generator
    assert (whole.engine_init_kwargs, whole.max_num_seqs) == ({"d": 3}, 9)
    other = load_config(text, ["generator.engine_init_kwargs={d: 3}"]).generator
    assert other.engine_init_kwargs == {"d": 3}
    inner = load_config(text, [f"{key}.a={{e: 4}}"]).generator
    assert inner.engine_init_kwargs == {"a": {"e": 4}, "c": 2}


def test_a_named_set_cannot_be_added_to_a_list() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("data: {val_data: [a.jsonl]}", ["data.val_data.mine=[t.jsonl]"])
    assert str(caught.value) == (
        "data.val_data.mine=['t.jsonl']: data.val_data=['a.jsonl'] is a list, to which no name can be "
        "added; set data.val_data={NAME: [...], ...} whole"
    )
    added = load_config("data: {val_data: []}", ["data.val_data.mine=[t.jsonl]"])
    assert added.data.val_data == {"mine": ["t.jsonl"]}


def test_a_list_or_null_replaces_what_is_there() -> None:
    text = "{data: {val_data: {x: [a]}, test_data: null}, trainer: {rope_scaling: {factor: 4}}}"
    config = load_config(text, ["data.val_data=[b]", "trainer.rope_scaling=null"])
    assert config.data.val_data == ["b"]
    assert config.data.test_data == {}
    assert config.trainer.rope_scaling is None


def test_unset_keys_follow_skyrls_rules() -> None:
    config = load_config(
        "",
        [
            "trainer.policy.model.path=tiny",
            "trainer.max_prompt_length=900",
            "generator.sampling_params.temperature=0.9",
            "generator.sampling_params.max_generate_length=64",
            "generator.eval_sampling_params.stop=['</tool_call>']",
            "generator.max_input_length=null",
            "trainer.run_name=first",
        ],
    )
    assert config.trainer.ref.model.path == "tiny"
    assert config.generator.max_input_length == 900
    assert config.trainer.algorithm.temperature == 0.9
    assert config.generator.eval_sampling_params.temperature == 0.0
    assert config.generator.eval_sampling_params.max_generate_length == 64
    assert config.generator.eval_sampling_params.stop == ["</tool_call>"]
    assert config.trainer.run_path == "runs/first"
    assert config.trainer.ckpt_path == "runs/first/checkpoints"


def test_evaluation_sets_have_names() -> None:
    plain = load_config("", ["data.val_data=[a]", "data.test_data={retail: r.parquet}"])
    assert plain.data.eval_sets == {"val": ["a"], "retail": ["r.parquet"]}
    named = load_config("", ["data.val_data={easy: [a, b]}", "data.retail_val_data=c"])
    assert named.data.eval_sets == {"easy": ["a", "b"], "retail_val": ["c"]}
    assert load_config().data.eval_sets == {}


def test_every_problem_is_reported_at_once_one_line_each() -> None:
    problems = find_problems(
        "trainer: {seed: -1, critic: {model: {lora: {rank: 8}}}}",
        "trainer.policy.modle.path=b",
        "trainer.max_turns=3",
        "trainer.algorithm.advantage_estimator=gpro",
        "trainer.ref=5",
        "data.val_data=3",
        "nonsense",
    )
    assert problems == [
        "'nonsense' is not an override; write it as key=value",
        "trainer.critic.model.lora.rank=8 is not supported: "
        "the critic is built like the policy and shares its device; drop it",
        "trainer.policy.modle.path='b' is unknown; did you mean trainer.policy.model.path?",
        "trainer.max_turns=3 is unknown; did you mean generator.max_turns?",
        "trainer.ref=5: trainer.ref is a section; set a key in it, such as trainer.ref.model.path",
        "data.val_data=3: it takes list[str] | dict[str, list[str]]",
        "trainer.algorithm.advantage_estimator='gpro': "
        "it takes grpo, rloo, maxrl, reinforce++, gae, distillation, "
        "or module:function of your own",
        "trainer.seed=-1: it takes int, at least 0",
    ]


def test_a_derived_value_that_does_not_fit_says_where_it_came_from() -> None:
    assert find_problems("", "generator.sampling_params.temperature=0") == [
        "trainer.algorithm.temperature=0: it takes float, above 0; "
        "unset, it is ${generator.sampling_params.temperature}"
    ]


def test_an_interval_is_never_zero() -> None:
    assert find_problems("", "trainer.max_ckpts_to_keep=0") == [
        "trainer.max_ckpts_to_keep=0: it takes int, -1 or at least 1"
    ]


@pytest.mark.parametrize(
    ("text", "overrides", "sentence"),
    [
        ("- a", (), "a configuration is a mapping of keys; this is ['a']"),
        ("", ("trainer.seed",), "'trainer.seed' is not an override; write it as key=value"),
        (
            "",
            ("trainer.run_name=[",),
            "trainer.run_name='[' is not a YAML value; put quotes inside, as in trainer.run_name='[\"a\", \"b\"]'",
        ),
        ("", ("zzz.qqq=1",), "zzz.qqq=1 is unknown; `skyfleet config explain` lists the keys"),
    ],
)
def test_unreadable_input_is_one_sentence(
    text: str, overrides: tuple[str, ...], sentence: str
) -> None:
    assert find_problems(text, *overrides) == [sentence]


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("", ("environment.skyrl_gym.env_config={password: hunter2",)),
        ("", ("environment.skyrl_gym.env_config={'db_password' :'hunter2",)),
        ("", ("environment.skyrl_gym.env_config=[a, {api_key=hunter2",)),
        ("", ("environment.skyrl_gym.fleet_task.api_key={hunter2",)),
        ("", ("password: hunter2",)),
        ("environment: {skyrl_gym: {env_config: {password: hunter2", ()),
        ("password:hunter2", ()),
    ],
)
def test_input_that_cannot_be_parsed_is_quoted_without_its_secrets(
    text: str, overrides: tuple[str, ...]
) -> None:
    (problem,) = find_problems(text, *overrides)
    assert "hunter2" not in problem


def test_a_key_that_is_set_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    text = "trainer:\n  seed: 1\n  policy: {model: {path: tiny}}\n  seed: 2\n"
    with pytest.raises(ConfigError) as raised:
        load_config(text)
    assert str(raised.value) == "trainer.seed is set on line 2 and again on line 4; keep one"
    (file := tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.yaml: trainer\.seed is set on line 2 and again"):
        load_config_file(file)
    # An alias and a merge are no duplicates.
    load_config("data: &d {train_data: []}\ntrainer: {seed: 1}\n")


@pytest.mark.parametrize(
    "load", [load_config_file, load_recorded_config, partial(config_from_python, overrides={})]
)
@pytest.mark.parametrize("text", ["trainer: [1,2\n", "- 1\n"])
def test_a_broken_file_is_named(load: Callable[[Path], object], text: str, tmp_path: Path) -> None:
    (file := tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        load(file)


def test_broken_yaml_is_one_sentence() -> None:
    (problem,) = find_problems("trainer: {seed: 1")
    assert problem.startswith("not YAML: ")


def test_a_file_is_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {seed: 5}")
    assert load_config_file(file, ["trainer.epochs=2"]).trainer.seed == 5
    with pytest.raises(ConfigError, match=r"absent\.yaml cannot be read"):
        load_config_file(tmp_path / "absent.yaml")


def test_configuration_needs_none_of_the_heavy_packages() -> None:
    program = (
        "import sys, skyfleet.config.loading; "
        "print(sorted({'torch', 'scipy', 'pyarrow', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_addresses_in_a_list_need_no_quotes() -> None:
    config = load_config(
        "", ["data.train_data=[world:github?count=3&seed=1, world:booking?count=2]"]
    )
    assert config.data.train_data == ["world:github?count=3&seed=1", "world:booking?count=2"]


def test_conflicts_and_unsupported_values_are_reported_beside_bad_values() -> None:
    assert find_problems(
        "",
        "trainer.sead=1",
        "trainer.epochs=0",
        "trainer.train_batch_size=6",
        "generator.max_input_length=100",
        "trainer.max_prompt_length=200",
        "trainer.policy.model.lora.dropout=0.1",
        "trainer.mtp.enabled=true",
    ) == [
        "trainer.sead=1 is unknown; did you mean trainer.seed?",
        "trainer.mtp.enabled=True is not supported: it trains draft heads under Megatron; drop it",
        "trainer.epochs=0: it takes int, at least 1",
        "trainer.train_batch_size=6 is not a multiple of trainer.policy_mini_batch_size=4; "
        "set trainer.train_batch_size to 4",
        "generator.max_input_length=100 is below trainer.max_prompt_length=200 "
        "with generator.max_turns=50; set trainer.max_prompt_length=100",
        "trainer.policy.model.lora.dropout=0.1 does not run in this version: "
        "the engine samples without dropout, so it would sample from another policy; use 0",
    ]


def test_a_default_in_place_of_a_bad_value_conflicts_with_nothing() -> None:
    assert find_problems(
        "", "trainer.train_batch_size=many", "trainer.policy_mini_batch_size=64"
    ) == ["trainer.train_batch_size='many': it takes int, at least 1"]
    assert find_problems("", "trainer.rope_scaling.factor=0.5", "data.val_data={a: 3}") == [
        "data.val_data={'a': 3}: it takes list[str] | dict[str, list[str]]",
        "trainer.rope_scaling.factor=0.5: it takes float, above 1",
    ]


def test_a_misspelt_secret_is_not_shown() -> None:
    (problem,) = find_problems("", "environment.skyrl_gym.fleet_task.apy_key=sk-123")
    assert "sk-123" not in problem


def test_a_section_built_in_python_is_checked_too() -> None:
    with pytest.raises(ValidationError, match="is not a multiple of"):
        Trainer(train_batch_size=3, policy_mini_batch_size=2)


def test_the_prompt_length_is_unlimited_unless_set_and_then_bounds_the_context() -> None:
    config = load_config()
    assert (config.trainer.max_prompt_length, config.generator.max_input_length) == (None, 512)
    config = load_config("", ["trainer.max_prompt_length=64"])
    assert (config.trainer.max_prompt_length, config.generator.max_input_length) == (64, 64)


def test_the_first_evaluation_set_is_the_main_one() -> None:
    assert load_config().data.main_eval_set is None
    named = load_config("", ["data.val_data={easy: [a], hard: [b]}", "data.test_data={retail: r}"])
    assert named.data.main_eval_set == "easy"
    assert (
        load_config("", ["data.val_data=[a]", "data.retail_val_data=r"]).data.main_eval_set == "val"
    )


def test_python_values_override_a_mapping_a_file_or_nothing(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {seed: 5, run_name: first}")
    overrides = {
        "data.train_data": [tmp_path / "a.jsonl"],
        "trainer.policy.optimizer_config.adam_betas": (0.8, 0.9),
        "generator.inference_engine.num_engines": 2,
        "generator.sampling_params": SamplingParams(stop=["</a>"]),
        "trainer.run_name": "1e3",
    }
    nested = {"trainer": {"seed": 5, "run_name": "first"}}
    dotted = {"trainer.seed": 5, "trainer.run_name": "first"}
    for base in (file, str(file), nested, dotted):
        config = config_from_python(base, overrides)
        assert config.trainer.seed == 5
        assert config.trainer.run_name == "1e3"  # text stays text
        assert config.data.train_data == [str(tmp_path / "a.jsonl")]
        assert config.trainer.policy.optimizer_config.adam_betas == (0.8, 0.9)
        assert config.generator.num_inference_engines == 2
        assert config.generator.sampling_params.stop == ["</a>"]
    assert config_from_python(None, {}) == RunConfig()


def test_a_configuration_is_the_base_with_its_secrets_and_ignored_keys() -> None:
    key = "environment.skyrl_gym.fleet_task.api_key"
    overrides = [f"{key}=canary-5d1f", "trainer.placement.critic_num_gpus_per_node=4"]
    base = load_config("", ["trainer.run_name=a", *overrides])
    assert config_from_python(base, {}) is base
    changed = config_from_python(base, {"trainer.seed": 3})
    assert (changed.trainer.run_name, changed.trainer.seed) == ("a", 3)
    assert changed.ignored_keys == base.ignored_keys
    assert changed.model_copy(update={"trainer": base.trainer}) == base


def test_python_values_are_refused_as_overrides_are() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_python(None, {"trainer.seed": "many", "trainer.sead": 1})
    assert str(caught.value).splitlines() == [
        "trainer.sead=1 is unknown; did you mean trainer.seed?",
        "trainer.seed='many': it takes int, at least 0",
    ]


def test_a_bare_name_is_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "presets"
    package.mkdir()
    (package / "small.yaml").write_text("trainer: {seed: 6}")
    monkeypatch.setattr(loading, "_find_presets", lambda: package)
    monkeypatch.chdir(tmp_path)
    assert preset_names() == ["small"]
    assert load_config_file("small").trainer.seed == 6
    assert config_from_python("small", {"trainer.epochs": 2}).trainer.epochs == 2
    with pytest.raises(ConfigError, match="smal is neither a file nor a preset; choose from small"):
        load_config_file("smal")
    Path("small").write_text("trainer: {seed: 7}")
    assert load_config_file("small").trainer.seed == 7  # a file wins
