"""SkyRL's quick start and Fleet's recipe train with their own overrides; only sizes are replaced."""

from __future__ import annotations

import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import skyrl_gym.envs.gsm8k.utils as gsm8k_utils
from tests.fakes.faulty_fleet import KEY, start_jail
from tests.fakes.recipes import FLEET_8B, RUN_GSM8K
from tests.fakes.serving import serving
from tests.fakes.small_runs import rows
from typer.testing import CliRunner

from skyfleet.cli.main import app
from skyfleet.config.loading import load_config
from skyfleet.tasks.loading import load_tasks, write_tasks
from skyfleet.trainer.training_run import run_training
from skyfleet.worlds.catalog import generate_world_tasks
from skyfleet.worlds.fleet_server.server import build_fleet_app

pytestmark = pytest.mark.slow

SMALL_MODEL = (
    "trainer.policy.model.path=tiny",
    "trainer.policy.model_config_kwargs={hidden_size: 32, intermediate_size: 48, "
    "num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, "
    "max_position_embeddings: 2200, vocab_size: 400}",
    "trainer.device=cpu",
    "trainer.logger=[jsonl]",
    "trainer.max_training_steps=3",
    "generator.sampling_params.max_generate_length=12",
)
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def write_gsm8k(file: Path, split: str, first: int, count: int) -> None:
    """Rows as examples/train/gsm8k/gsm8k_dataset.py of SkyRL writes them."""
    written = []
    for index in range(count):
        n = first + index
        question = f"Ann has {n} apples and buys 3 more. How many has she?"
        answer = f"She has {n}+3=<<{n}+3={n + 3}>>{n + 3} apples.\n#### {n + 3}"
        written.append(
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
                "env_class": "gsm8k",
                "reward_spec": {"method": "rule", "ground_truth": str(n + 3)},
                "extra_info": {
                    "split": split,
                    "index": index,
                    "answer": answer,
                    "question": question,
                },
            }
        )
    pq.write_table(pa.Table.from_pylist(written), file)


async def test_skyrls_quick_start_trains_three_steps_through_skyrl_gyms_gsm8k(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gsm8k(tmp_path / "train.parquet", "train", 0, 32)
    write_gsm8k(tmp_path / "validation.parquet", "test", 50, 4)
    graded: list[str] = []
    compute_score = gsm8k_utils.compute_score

    def right_every_other_time(solution_str: str, ground_truth: str) -> float:
        graded.append(ground_truth)
        # A model of random weights gives no right answer, and equal rewards teach nothing.
        right = f"#### {ground_truth}" if len(graded) % 2 else ""
        return float(compute_score(solution_str + right, ground_truth))

    monkeypatch.setattr(gsm8k_utils, "compute_score", right_every_other_time)
    config = load_config(
        "",
        [
            *shlex.split(RUN_GSM8K),
            *SMALL_MODEL,
            "generator.inference_engine.backend=embedded",
            f"data.train_data=['{tmp_path}/train.parquet']",
            f"data.val_data=['{tmp_path}/validation.parquet']",
            f"trainer.ckpt_path={tmp_path}/ckpts",
            f"trainer.run_path={tmp_path}/run",
            "trainer.train_batch_size=4",
            "trainer.policy_mini_batch_size=2",
            "trainer.micro_train_batch_size_per_gpu=5",
        ],
    )
    outcome = await run_training(config)
    assert outcome.step == 3
    before, *steps = rows(tmp_path / "run")
    # Beside the episodes: the tasks that the tokenizer is trained on, and the null baseline.
    assert len(graded) >= 4 + 3 * 4 * 5 + 4
    assert set(graded) == {str(n + 3) for n in (*range(32), *range(50, 54))}
    assert "eval/openai_gsm8k/pass_at_1" in before
    assert [step["generation/avg_reward"] for step in steps] == [0.5] * 3
    assert all(step["policy/grad_norm"] > 0 for step in steps)
    assert (tmp_path / "ckpts" / "global_step_3").is_dir()


async def test_fleets_recipe_trains_against_a_fleet_compatible_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = generate_world_tasks("github", split="all", count=24)
    write_tasks(tmp_path / "tasks.json", tasks)
    prepare = ["tasks", "prepare", "--tasks-json", f"{tmp_path}/tasks.json", "--eval-ratio", "0.3"]
    made = CliRunner().invoke(app, [*prepare, "--output-dir", f"{tmp_path}/fleet"])
    assert made.exit_code == 0, made.output
    # The tiny model is built with any context, so Fleet's YaRN goes with the model it is for.
    overrides = [line for line in shlex.split(FLEET_8B) if "rope_scaling" not in line]
    server = build_fleet_app(tasks, api_key=KEY)
    await start_jail()
    async with serving(server) as base_url:
        monkeypatch.setenv("FLEET_API_KEY", KEY)
        monkeypatch.setenv("FLEET_BASE_URL", base_url)
        config = load_config(
            "",
            [
                *overrides,
                *SMALL_MODEL,
                "generator.backend=embedded",
                f"data.train_data=['{tmp_path}/fleet/train.parquet']",
                f"data.val_data=['{tmp_path}/fleet/validation.parquet']",
                f"environment.skyrl_gym.fleet_task.tasks_file={tmp_path}/tasks.json",
                f"trainer.ckpt_path={tmp_path}/ckpts",
                f"trainer.run_path={tmp_path}/run",
                "trainer.train_batch_size=2",
                "trainer.policy_mini_batch_size=2",
                "generator.max_input_length=2000",
                "generator.max_turns=2",
            ],
        )
        outcome = await run_training(config)
    assert outcome.step == 3
    n_eval = len(load_tasks(tmp_path / "fleet" / "validation.parquet"))
    # Greedy attempts are equal, but each is run: a warning, not a refusal.
    assert (
        "generator.eval_n_samples_per_prompt=3 with generator.eval_sampling_params" in caplog.text
    )
    instances = server.state.instances
    assert instances.created == instances.deleted >= 2 * 3 * n_eval + 3 * 2 * 4
    before, *steps = rows(tmp_path / "run")
    assert before["eval/all/unknown_grades"] == 0
    assert {"eval/all/pass_at_3", "eval/github/pass_at_3"} <= before.keys()
    assert [step["environment/github/num_episodes"] for step in steps] == [8.0] * 3
