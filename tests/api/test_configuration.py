"""Arguments become configuration keys, and what they cannot hold is passed beside them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import skyfleet as sf
from skyfleet.algorithms.registry import build_advantage_estimator
from skyfleet.api.config import read_config
from skyfleet.api.models import resolve_model
from skyfleet.api.tasks import load_given_tasks
from skyfleet.api.train_plan import TrainArguments, TrainingPlan, plan_training
from skyfleet.config.keys import dump_yaml
from skyfleet.config.loading import load_config
from skyfleet.config.root import RunConfig
from skyfleet.presets import find_preset, list_presets

TASKS = [{"prompt": f"Say {n}.", "number": n} for n in range(60)]
ROOT = Path(__file__).parents[2]


def plan(model: object = "tiny", env: object = None, **arguments: Any) -> TrainingPlan:
    arguments = {"tasks": TASKS, "reward": lambda answer: 0.0, **arguments}
    return plan_training("sf.train", model, env, arguments)  # type: ignore[arg-type]


def test_every_argument_sets_its_key() -> None:
    config = plan(
        "Qwen/Qwen3-0.6B",
        algorithm=sf.GRPO(group_size=8, kl=0.01, clip=(0.2, 0.28)),
        sampling=sf.Sampling(temperature=0.9, max_tokens=128),
        eval_attempts=1,
        lr=2e-6,
        batch_size=16,
        steps=30,
        eval_every=10,
        lora=sf.LoRA(rank=16),
        engine="vllm",
        trackers=["tensorboard"],
        seed=7,
        run_dir="runs/mine",
        config={"trainer.algorithm.loss_reduction": "sequence_mean"},
    ).config
    trainer, generator = config.trainer, config.generator
    assert trainer.policy.model.path == "Qwen/Qwen3-0.6B"
    assert (generator.n_samples_per_prompt, generator.backend) == (8, "vllm")
    assert (generator.sampling_params.temperature, generator.max_turns) == (0.9, 1)
    assert generator.sampling_params.max_generate_length == 128
    assert (trainer.algorithm.kl_loss_coef, trainer.algorithm.use_kl_loss) == (0.01, True)
    assert (trainer.algorithm.eps_clip_low, trainer.algorithm.eps_clip_high) == (0.2, 0.28)
    assert trainer.algorithm.loss_reduction == "sequence_mean"
    assert trainer.policy.optimizer_config.lr == 2e-6
    assert (trainer.train_batch_size, trainer.policy_mini_batch_size) == (16, 16)
    assert (trainer.max_training_steps, trainer.eval_interval, trainer.seed) == (30, 10, 7)
    assert trainer.epochs * (54 // 16) >= 30
    assert (trainer.policy.model.lora.rank, trainer.logger) == (16, ["tensorboard"])
    assert (trainer.run_path, trainer.run_name) == ("runs/mine", "mine")
    assert trainer.ckpt_path == "runs/mine/checkpoints"


def test_the_obvious_meaning_of_a_shorter_value_is_taken() -> None:
    trainer = plan("Qwen/Qwen3-0.6B", trackers="tensorboard", lora=True).config.trainer
    assert (trainer.logger, trainer.policy.model.lora.rank) == (["tensorboard"], 32)
    assert plan("Qwen/Qwen3-0.6B", lora=False).config.trainer.policy.model.lora.rank == 0


def test_a_key_of_config_wins_over_an_argument() -> None:
    assert (
        plan(
            lr=1e-3, config={"trainer.policy.optimizer_config.lr": 1e-4}
        ).config.trainer.policy.optimizer_config.lr
        == 1e-4
    )


def test_a_preset_or_a_file_is_the_base_and_keys_come_on_top(tmp_path: Path) -> None:
    config = plan(config=["tiny", {"trainer.seed": 7}], lr=1e-5, steps=2).config
    assert config.trainer.seed == 7
    assert config.trainer.policy.optimizer_config.weight_decay == 0.0
    assert config.trainer.warm_start.steps == 0
    path = tmp_path / "mine.yaml"
    path.write_text("trainer: {run_name: mine}")
    assert read_config(path).build({}).trainer.run_name == "mine"


def test_steps_are_trained_whatever_the_batch_size_of_a_base() -> None:
    from skyfleet.trainer.tasks import build_schedule

    for given in ("tiny", {"trainer": {"train_batch_size": 32, "policy_mini_batch_size": 32}}):
        planned = plan(tasks=TASKS, steps=50, config=given)
        assert planned.given.train_tasks is not None
        n_tasks = len(planned.given.train_tasks)
        assert build_schedule(planned.config, n_tasks=n_tasks).total_steps == 50
    assert (
        build_schedule(
            plan_training("sf.train", None, None, {"config": "tiny", "steps": 9999}).config,
            n_tasks=128,
        ).total_steps
        == 9999
    )


def test_tasks_given_with_a_base_replace_its_evaluation_sets() -> None:
    planned = plan(config="tiny")
    assert planned.given.eval_sets is not None
    assert list(planned.given.eval_sets) == ["held_out"]
    assert planned.config.data.eval_sets == {}
    named = plan(config=["tiny", {"data.val_data": ["world:github?split=unseen_tasks&count=4"]}])
    assert named.given.eval_sets is None


def test_a_base_with_a_model_or_tasks_trains_in_a_folder_of_its_own(tmp_path: Path) -> None:
    own = plan(config="tiny").config.trainer
    assert own.run_path != find_base("tiny").trainer.run_path
    assert own.ckpt_path == f"{own.run_path}/checkpoints"
    alone = plan_training("sf.train", None, None, {"config": "tiny"}).config.trainer
    assert alone.run_path == find_base("tiny").trainer.run_path
    # A saved configuration names the checkpoints of its own run.
    (tmp_path / "config.yaml").write_text(dump_yaml(plan(run_dir="runs/first").config))
    second = plan(config=tmp_path, run_dir="runs/second").config.trainer
    assert (second.ckpt_path, second.export_path) == (
        "runs/second/checkpoints",
        "runs/second/exports",
    )


def test_another_model_than_the_bases_has_its_own_dimensions() -> None:
    assert plan(config="tiny").config.trainer.policy.model_config_kwargs == (
        find_base("tiny").trainer.policy.model_config_kwargs
    )
    other = plan("Qwen/Qwen3-0.6B", config="tiny").config
    assert other.trainer.policy.model_config_kwargs == {}


def find_base(name: str) -> RunConfig:
    return read_config(name).load_base()


def test_a_preset_alone_is_a_whole_run() -> None:
    planned = plan_training("sf.train", None, None, {"config": "tiny"})
    preset = find_preset("tiny")
    assert preset is not None
    assert planned.config == load_config(preset.text)
    assert planned.given.train_tasks is None
    assert planned.given.eval_sets is None


def test_without_evaluation_tasks_a_tenth_is_held_out() -> None:
    given = plan().given
    assert given.train_tasks is not None
    assert given.eval_sets is not None
    held_out = given.eval_sets["held_out"]
    assert len(held_out) + len(given.train_tasks) == 60
    assert plan(eval=False).given.eval_sets == {}
    few = plan(tasks=TASKS[:8])
    assert few.given.eval_sets == {}
    assert "pass eval=tasks" in few.notes[0]


def test_evaluation_sets_may_have_names() -> None:
    sets = plan(tasks=TASKS[:8], eval={"unseen": TASKS[8:]}, run_dir="runs/notes").given.eval_sets
    assert sets is not None
    assert {task.env_key for task in sets["unseen"]} == {"notes"}


@pytest.mark.parametrize("kind", ["frame", "table", "dicts", "tasks", "file"])
def test_tasks_of_every_kind_are_the_same_tasks(kind: str, tmp_path: Path) -> None:
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"key": "a", "env_key": "env", "prompt": "Say 0.", "metadata": {"number": 0}}')
    rows = [{"prompt": "Say 0.", "number": 0, "key": "a"}]
    given: dict[str, Any] = {
        "frame": pandas.DataFrame(rows),
        "table": pyarrow.Table.from_pylist(rows),
        "dicts": rows,
        "tasks": load_given_tasks(rows),
        "file": path,
    }
    (task,) = load_given_tasks(given[kind])
    assert (task.key, task.prompt, task.metadata) == ("a", "Say 0.", {"number": 0})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"model": None}, r"sf.train\(model=...\): model is missing"),
        ({"tasks": None}, r"sf.train\(tasks=...\): tasks is missing"),
        ({"tasks": {"prompt": "Hello"}}, "pass a list"),
        ({"learning_rate": 1.0}, r"sf.train\(learning_rate=...\) is not an argument; use lr="),
        ({"num_generations": 8}, r"use algorithm=sf.GRPO\(group_size=...\)"),
        ({"stepz": 8}, r"did you mean steps\?"),
        ({"env": "wrold:github", "reward": None}, r"did you mean world:github\?"),
        ({"env": "world:githb", "reward": None, "tasks": None}, r"did you mean github\?"),
        ({"tasks": "world:github"}, "count is missing: write world:github\\?count=100"),
        ({"tasks": "world:githb"}, r"did you mean github\?"),
        ({"tasks": "world:github?split=train"}, r"write world:github\?split=train&count=100"),
        (
            {"config": "unknown"},
            "unknown is neither a file nor a preset; choose from fleet_both, fleet_computer_use",
        ),
        ({"config": {"trainer.sede": 1}}, r"trainer\.sede.* is unknown"),
        ({"model": 3}, "pass a Hugging Face name, a folder"),
        ({"model": "oracle"}, r"a scripted agent only plays: sf.evaluate"),
        ({"tasks": [{"text": "Hello"}]}, "tasks row 1: prompt"),
        ({"algorithm": sf.GRPO}, r"call it: algorithm=sf\.GRPO\(\)"),
        ({"algorithm": 3}, r"sf\.train\(algorithm=3\): pass an algorithm"),
        ({"sampling": {"temperature": 1.0}}, r"sampling=.*: pass sf\.Sampling"),
        ({"eval_sampling": 1.0}, r"eval_sampling=1\.0\): pass sf\.Sampling"),
        ({"algorithm": sf.GRPO(clip=(0.1, 0.2, 0.3))}, "pass a number, or two"),  # type: ignore[arg-type]
        ({"lora": "yes"}, r"pass sf\.LoRA\(rank=32\), or the rank"),
        ({"tasks": "tau_bench:retial"}, "tau-bench has no domain 'retial'; choose from retail"),
        ({"steps": "ten"}, r"sf\.train\(steps='ten'\): pass a whole number"),
        ({"steps": 1.5}, r"^sf\.train\(steps=1\.5\): pass a whole number$"),
        ({"batch_size": True}, r"sf\.train\(batch_size=True\): pass a whole number"),
        ({"eval_attempts": "2"}, r"sf\.train\(eval_attempts='2'\): pass a whole number"),
        ({"lr": "1e-4x"}, r"sf\.train\(lr='1e-4x'\): pass a number"),
        ({"run_dir": "a\0b"}, r"sf\.train\(run_dir='a\\x00b'\): a path has no NUL character"),
        ({"run_dir": __file__}, "this is a file; pass the path of a folder"),
    ],
)
def test_misuse_is_answered_in_the_callers_terms(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(sf.SkyfleetError, match=sentence):
        plan(**arguments)


def test_the_algorithms_load_as_configurations() -> None:
    for algorithm in (
        sf.GRPO(),
        sf.RLOO(),
        sf.DAPO(),
        sf.GSPO(),
        sf.CISPO(clip=(1.0, 4.0)),
        sf.PPO(),
    ):
        config = plan(algorithm=algorithm).config
        assert config.trainer.algorithm.advantage_estimator in ("grpo", "rloo", "gae")


def test_two_functions_of_one_name_are_two_estimators() -> None:
    def scaled(factor: float) -> Any:
        def scale_rewards(rewards: list[float]) -> list[float]:
            return [factor * reward for reward in rewards]

        return sf.estimator(scale_rewards)

    names = [
        plan(algorithm=sf.GRPO(advantage=scaled(factor))).config.trainer.algorithm
        for factor in (1.0, 2.0, 1.0)
    ]
    assert [algorithm.advantage_estimator for algorithm in names] == [
        "python:scale_rewards",
        "python:scale_rewards_2",
        "python:scale_rewards",
    ]
    assert build_advantage_estimator(names[1])([1.0]) == [2.0]  # type: ignore[operator]


def test_every_preset_loads_under_its_run_name() -> None:
    names = {
        "tiny": "local_tiny_cpu",
        "generalise": "generalise",
        "generalise_plain": "generalise_plain",
        "generalise_script": "generalise_script",
        "generalise_script_plain": "generalise_script_plain",
        "smollm2": "smollm2_135m",
        "smollm2_cpu": "smollm2_135m_cpu",
        "smollm2_h200": "smollm2_135m_h200",
        "fleet_qwen3_8b": "fleet_tool_use_qwen3_8b",
        "fleet_tool_use": "fleet_tool_use",
        "fleet_computer_use": "fleet_computer_use",
        "fleet_both": "fleet_both",
        "qwen3_8b_8xh200": "qwen3_8b_8xh200",
        "qwen3_32b_8xh200": "qwen3_32b_8xh200",
        "qwen3_30b_a3b_8xh200": "qwen3_30b_a3b_8xh200",
    }
    assert {preset.name for preset in list_presets()} == set(names)
    for name, file in names.items():
        preset = find_preset(name)
        assert preset is not None
        assert preset.description.endswith(".")
        config = read_config(name).build({})
        assert config.trainer.run_name == file


def test_several_evaluation_attempts_are_sampled_at_temperature_1() -> None:
    def temperature(**arguments: Any) -> float:
        return plan(**arguments).config.generator.eval_sampling_params.temperature

    assert (temperature(eval_attempts=1), temperature(eval_attempts=4)) == (0.0, 1.0)
    assert temperature(eval_attempts=4, eval_sampling=sf.Sampling(max_tokens=8)) == 1.0
    assert temperature(eval_attempts=4, eval_sampling=sf.Sampling(temperature=0.5)) == 0.5
    key = {"generator.eval_sampling_params.temperature": 0.3}
    assert temperature(eval_attempts=4, config=key) == 0.3


def test_tasks_without_an_environment_or_a_reward_are_refused() -> None:
    with pytest.raises(sf.ConfigError, match=r"sf.train: the tasks.*pass env= or reward="):
        plan(reward=None)
    with pytest.raises(sf.ConfigError, match=r"sf.evaluate: the tasks.*pass env= or reward="):
        sf.evaluate("null", tasks=TASKS[:1])
    named = [{**TASKS[0], "env_class": "gsm8k"}]
    plan(reward=None, tasks=named)
    plan(reward=None, config={"environment.env_class": "gsm8k"})


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("runs/weathr", "no such folder; did you mean 'runs/weather'?"),
        ("runs/other/thing", "no such folder; check the path"),
        ("./nowhere", "no such folder; check the path"),
        ("runs", "the folder holds no model and no run"),
        ("tinny", "no such model; did you mean 'tiny'?"),
        ("nul", "no such model; did you mean 'null'?"),
        ("smollm", "no such model; did you mean 'smollm2'?"),
    ],
)
def test_a_mistyped_model_is_refused_before_the_hub_is_asked(
    model: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "weather").mkdir(parents=True)
    (tmp_path / "runs" / "weather" / "config.yaml").touch()
    with pytest.raises(sf.ConfigError) as raised:
        sf.evaluate(model, reward=lambda answer: 0.0, tasks=TASKS[:1])
    assert f"sf.evaluate(model={model!r}): {says}" in str(raised.value)


def test_only_a_folder_with_a_model_replaces_a_built_in_model_or_one_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert plan("tiny").config.trainer.policy.model.path == "tiny"
    name, other = "Qwen/Qwen3-0.6B", tmp_path / "Qwen" / "Qwen3-0.6B-tuned"
    other.mkdir(parents=True)
    assert plan(name).config.trainer.policy.model.path == name
    (other / "config.json").write_text("{}")
    assert resolve_model(name, where="sf.train").folder is None
    Path(name).mkdir()
    (Path(name) / "config.json").write_text("{}")
    assert resolve_model(name, where="sf.train").folder == Path(name)


@pytest.mark.parametrize(
    ("settings", "given", "says"),
    [
        (sf.GRPO, {"num_generations": 8}, "sf.GRPO(num_generations=...) is not an argument; use group_size="),
        (sf.GRPO, {"beta": 0.1}, "use kl="),
        (sf.Sampling, {"max_new_tokens": 4}, "sf.Sampling(max_new_tokens=...) is not an argument; use max_tokens="),
        (sf.Sampling, {"temprature": 1.0}, "use temperature="),
        (sf.LoRA, {"zzz": 1}, "the arguments are rank, alpha"),
    ],
)  # fmt: skip
def test_an_unknown_setting_names_the_right_one(
    settings: Any, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(sf.ConfigError) as raised:
        settings(**given)
    assert says in str(raised.value)
    with pytest.raises(sf.ConfigError, match="pass it by name"):
        settings(8)
    assert "group_size" in str(inspect.signature(sf.GRPO))


@pytest.mark.parametrize(
    ("settings", "given", "says"),
    [
        (sf.GRPO, {"group_size": -1}, "sf.GRPO(group_size=-1): pass a whole number of at least 1"),
        (sf.RLOO, {"kl": -0.1}, "sf.RLOO(kl=-0.1): pass a number of at least 0"),
        (sf.Sampling, {"temperature": -1}, "sf.Sampling(temperature=-1): pass a number of at least 0"),
        (sf.Sampling, {"max_tokens": 0}, "sf.Sampling(max_tokens=0): pass a whole number of at least 1"),
        (sf.Sampling, {"top_p": 2}, "sf.Sampling(top_p=2): pass a number from 0 to 1"),
        (sf.LoRA, {"rank": "8"}, "sf.LoRA(rank='8'): pass a whole number of at least 0"),
    ],
)  # fmt: skip
def test_a_setting_that_no_run_accepts_is_refused_when_it_is_made(
    settings: Any, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(sf.ConfigError) as raised:
        settings(**given)
    assert str(raised.value) == says


def test_a_row_of_a_table_is_refused_with_what_to_use() -> None:
    table = sf.Table.from_rows([{"step": 0, "loss": 2.0}])
    for misuse in (lambda: table[0], lambda: list(table)):  # type: ignore[index, call-overload]
        with pytest.raises(
            sf.ConfigError, match=r"table\[0\]: name a column, such as 'step', 'loss'"
        ):
            misuse()


def test_a_tool_that_is_not_in_a_list_is_refused() -> None:
    def press() -> str:
        return "ok"

    with pytest.raises(sf.ConfigError, match=r"tools=press\): pass a list: tools=\[press\]"):
        sf.ToolEnv(tools=press, reward=lambda answer: 0.0)  # type: ignore[arg-type]


def test_help_shows_the_defaults_of_the_documentation() -> None:
    page = (ROOT / "docs" / "python_api.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(\w+)` \| (.+?) \| .* \|$", page, re.MULTILINE)
    documented = {
        name: default for name, default in table if name in TrainArguments.__annotations__
    }
    shown = re.findall(r"^ {8}(\w+) {2,}(.+)$", sf.train.__doc__ or "", re.MULTILINE)
    assert [(name, re.sub('["`]', "", text)) for name, text in shown] == [
        (name, re.sub('["`]', "", text)) for name, text in documented.items()
    ]
    assert len(shown) == 15


def test_the_defaults_are_those_of_the_documentation() -> None:
    config = plan("Qwen/Qwen3-0.6B").config
    trainer, generator = config.trainer, config.generator
    assert (trainer.policy.optimizer_config.lr, trainer.train_batch_size) == (1e-6, 4)
    assert (trainer.epochs, trainer.max_training_steps, trainer.seed) == (20, None, 42)
    assert (trainer.algorithm.advantage_estimator, trainer.algorithm.kl_loss_coef) == ("grpo", 1e-3)
    assert (generator.n_samples_per_prompt, generator.eval_n_samples_per_prompt) == (4, 1)
    sampling = generator.sampling_params
    assert (sampling.temperature, sampling.max_generate_length) == (1.0, 1024)
    assert (generator.backend, generator.eval_sampling_params.temperature) == ("embedded", 0.0)
    tiny = plan("tiny").config
    assert tiny.trainer.policy.optimizer_config.lr == 3e-4
    assert tiny.generator.sampling_params.max_generate_length == 64
