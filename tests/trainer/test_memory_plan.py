"""A run that cannot fit into memory is refused in one sentence before anything is loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.small_models import DIMENSIONS, llama, qwen3
from tests.fakes.small_runs import SETTINGS, small_config
from typer.testing import CliRunner

from skyfleet.cli.main import app
from skyfleet.config.keys import diff
from skyfleet.config.loading import load_config_file
from skyfleet.errors import ConfigError
from skyfleet.models.decoder import Decoder
from skyfleet.models.packed import PackedAttention
from skyfleet.models.shape import read_model_shape, shape_of_module
from skyfleet.trainer import fit_memory
from skyfleet.trainer.available_memory import GIB, AvailableMemory
from skyfleet.trainer.fit_memory import fit_inference, fit_training
from skyfleet.trainer.memory_parts import Models
from skyfleet.trainer.memory_plan import plan_training
from skyfleet.trainer.refit_memory import fit_resumed, list_fitted_settings
from skyfleet.trainer.run import TrainerState
from skyfleet.trainer.training_run import open_training_run, run_training
from skyfleet.trainer.update_memory import activations_per_token

SHAPES = Path(__file__).parents[1] / "assets" / "model_shapes"
_opened: list[str] = []
_watching = False


def _record_open(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event == "open":
        _opened.append(str(arguments[0]))


sys.addaudithook(_record_open)


def memory(gib: float) -> AvailableMemory:
    return AvailableMemory(n_bytes=int(gib * GIB), held_bytes=GIB // 2, source="a test")


@pytest.fixture
def eight_gib(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A machine of 8 GiB; yields the files that were opened."""
    global _watching
    monkeypatch.setattr(fit_memory, "read_cpu_memory", lambda: memory(8))
    _opened.clear()
    _watching = True
    yield _opened
    _watching = False


def use(model: str, section: str = "policy") -> str:
    return f"trainer.{section}.model.path={SHAPES / model}"


PLAIN = "trainer.policy.model_config_kwargs={}"
TOO_LARGE = {
    "8B parameters with AdamW": (
        [use("llama_8b"), PLAIN],
        ["optimizer 59.8 GiB", "lora.rank", "trainer.policy.model.path"],
    ),
    "8B parameters in bfloat16 with LoRA": (
        [use("llama_8b"), PLAIN, "trainer.bf16=true", "trainer.policy.model.lora.rank=8"],
        ["weights 15.0 GiB", "trainer.policy.model.path"],
    ),
    "all experts of a mixture count": (
        [use("qwen3_30b_a3b"), PLAIN, "trainer.bf16=true"],
        ["weights 56.9 GiB"],
    ),
    "512 sequences at once": (
        [
            use("llama_135m"),
            PLAIN,
            "generator.max_num_seqs=512",
            "trainer.train_batch_size=64",
            "generator.n_samples_per_prompt=8",
        ],
        ["KV cache 22.2 GiB", "generator.max_num_seqs"],
    ),
    "a context of a million tokens": (
        [use("llama_135m"), PLAIN, "generator.max_input_length=1000000"],
        ["activations ", "generator.max_input_length"],
    ),
    "a micro-batch of a million tokens": (
        [
            use("llama_135m"),
            PLAIN,
            "trainer.max_tokens_per_microbatch=1000000",
            "trainer.train_batch_size=128",
            "trainer.policy_mini_batch_size=128",
            "generator.n_samples_per_prompt=8",
        ],
        ["activations ", "trainer.max_tokens_per_microbatch"],
    ),
    "micro-batches of 512 sequences": (
        [
            use("llama_135m"),
            PLAIN,
            "trainer.micro_train_batch_size_per_gpu=512",
            "trainer.max_tokens_per_microbatch=-1",
            "generator.n_samples_per_prompt=512",
        ],
        ["activations ", "trainer.micro_train_batch_size_per_gpu"],
    ),
    "activations that must not be recomputed": (
        [
            use("llama_135m"),
            PLAIN,
            "trainer.gradient_checkpointing=false",
            "generator.max_input_length=6000",
        ],
        ["activations ", "trainer.gradient_checkpointing=true"],
    ),
    "a critic and a reference of 1B parameters": (
        [
            use("llama_135m"),
            PLAIN,
            use("llama_1b", "critic"),
            use("llama_1b", "ref"),
            "trainer.algorithm.advantage_estimator=gae",
            "trainer.algorithm.use_kl_loss=true",
        ],
        ["critic and its optimizer 13.8 GiB", "trainer.critic.model.path"],
    ),
    "a reference of 8B parameters": (
        [use("llama_135m"), PLAIN, use("llama_8b", "ref"), "trainer.algorithm.use_kl_loss=true"],
        ["reference model 29.9 GiB", "trainer.ref.model.path"],
    ),
    "logits of a wide vocabulary": (
        [
            use("wide_vocabulary"),
            PLAIN,
            "trainer.loss_chunk_size=4096",
            "trainer.max_tokens_per_microbatch=4096",
        ],
        ["logits ", "trainer.loss_chunk_size"],
    ),
    "a prefill of a million tokens": (
        [
            use("llama_1b"),
            PLAIN,
            "trainer.bf16=true",
            "trainer.policy.model.lora.rank=8",
            "generator.max_num_batched_tokens=1000000",
            "generator.max_num_seqs=4096",
            "trainer.train_batch_size=512",
            "trainer.policy_mini_batch_size=1",
            "generator.max_input_length=100",
        ],
        ["prefill", "generator.max_num_batched_tokens"],
    ),
}


@pytest.mark.parametrize(("overrides", "expected"), TOO_LARGE.values(), ids=TOO_LARGE.keys())
async def test_a_run_that_cannot_fit_is_refused_before_anything_is_loaded(
    tmp_path: Path, eight_gib: list[str], overrides: list[str], expected: list[str]
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ConfigError) as refused:
        await run_training(small_config(folder, *overrides))
    sentence = str(refused.value)
    assert "\n" not in sentence
    for text in (*expected, "the run needs ", " of memory", "it can have 8.0 GiB"):
        assert text in sentence, sentence
    assert not folder.exists()
    assert not [path for path in eight_gib if path.endswith((".safetensors", ".bin", ".gguf"))]
    settings = tmp_path / "run.yaml"
    settings.write_text(f"{SETTINGS}\n")
    arguments = ["train", str(settings), f"trainer.run_path={folder}", *overrides, "--dry-run"]
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert sentence in str(refused.value).splitlines()


def test_serving_weights_that_cannot_fit_is_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path, use("llama_8b"), PLAIN)
    with pytest.raises(ConfigError, match=r"needs 31.* GiB .*weights 29.9 GiB.*trainer.bf16=true"):
        fit_inference(config, available=memory(8))
    assert fit_inference(config, available=memory(64)).plan


@pytest.mark.parametrize(
    "command", [["evaluate"], ["serve"], ["rollout", "world:github?split=train&count=1"]]
)
def test_a_dry_run_of_inference_plans_its_memory(
    tmp_path: Path, eight_gib: list[str], command: list[str]
) -> None:
    settings = tmp_path / "run.yaml"
    settings.write_text(f"{SETTINGS}\n")

    def run(*arguments: str) -> str:
        line = [*command, str(settings), f"trainer.run_path={tmp_path / 'run'}", *arguments]
        return CliRunner().invoke(app, [*line, "--dry-run"], catch_exceptions=False).output

    assert "\n# the run needs " in run(use("llama_135m"), PLAIN)
    assert "8.0 GiB (a test)" in run("--checkpoint", str(SHAPES / "llama_135m"))
    for large in ((use("llama_8b"), PLAIN), ("--checkpoint", str(SHAPES / "llama_8b"))):
        with pytest.raises(ConfigError, match=r"weights 29.9 GiB.*and it can have 8.0 GiB"):
            run(*large)
    assert not [path for path in eight_gib if path.endswith((".safetensors", ".bin", ".gguf"))]


@pytest.mark.parametrize(("itemsize", "moments"), [(2, 12), (4, 8)])
def test_an_offloaded_optimizer_is_on_the_gpu_during_its_step(
    tmp_path: Path, itemsize: int, moments: int
) -> None:
    shape = read_model_shape(str(SHAPES / "llama_8b"), {})
    assert shape is not None
    models = Models(policy=shape, critic=shape, on_gpu=True, itemsize=itemsize)
    # Between steps neither the policy's optimizer nor the critic's is there; in one, only its own.
    overrides = [
        "trainer.policy.optimizer_config.offload_after_step=true",
        "trainer.critic.optimizer_config.offload_after_step=true",
    ]
    plan = plan_training(small_config(tmp_path, *overrides), models, rows=1)
    n = shape.n_parameters
    (cache,) = (part.n_bytes for part in plan.held if part.name == "KV cache")
    assert plan.peak_bytes == 2 * itemsize * n + (4 + moments) * n + cache
    assert plan.learner_bytes == plan.peak_bytes - cache - itemsize * n
    both = plan_training(small_config(tmp_path), models, rows=1)
    assert both.peak_bytes > plan.peak_bytes + moments * n
    config = small_config(
        tmp_path, use("llama_8b"), PLAIN, "trainer.policy.model.lora.rank=8", overrides[0]
    )
    lora = read_model_shape(str(SHAPES / "llama_8b"), {}, lora=config.trainer.policy.model.lora)
    assert lora is not None
    adapted = plan_training(config, Models(policy=lora, on_gpu=True, itemsize=itemsize), rows=1)
    steps = [phase[1].n_bytes for phase in adapted.phases if "step" in phase[1].name]
    assert steps == [8 * lora.n_adapter_parameters]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_an_asynchronous_run_holds_a_copy_of_the_weights_and_samples_during_updates(
    tmp_path: Path, on_gpu: bool
) -> None:
    shape = read_model_shape(str(SHAPES / "llama_8b"), {})
    assert shape is not None
    models = Models(policy=shape, on_gpu=on_gpu, itemsize=2)
    synchronous = plan_training(small_config(tmp_path), models, rows=1)
    enabled = "trainer.fully_async.enabled=true"
    asynchronous = plan_training(small_config(tmp_path, enabled), models, rows=1)
    added = asynchronous.peak_bytes - synchronous.peak_bytes
    (rollouts, *_) = synchronous.phases
    n_sampling = sum(part.n_bytes for part in rollouts)
    assert added == 2 * shape.n_parameters + n_sampling
    # The engine sizes its KV cache after its copy exists.
    assert asynchronous.learner_bytes - synchronous.learner_bytes == sum(
        part.n_bytes for part in rollouts if part.name != "KV cache"
    )


@pytest.mark.parametrize("preset", ["tiny", "smollm2"])
def test_with_enough_memory_no_setting_changes(preset: str) -> None:
    config = load_config_file(preset, ["trainer.device=cpu"])
    fitted = fit_training(config, available=memory(32))
    assert fitted.config == config
    assert fitted.changes == ()


def test_a_preset_shrinks_to_the_memory_there_is() -> None:
    config = load_config_file("smollm2", ["trainer.device=cpu"])
    fitted = fit_training(config, available=memory(8))
    assert {key: now for key, (_, now) in diff(config, fitted.config).items()} == {
        "generator.max_num_seqs": 64,
        "trainer.gradient_checkpointing": True,
    }
    assert len(fitted.changes) == 2
    assert fitted.plan is not None
    assert fitted.plan.peak_bytes < 7.5 * GIB
    # With still less, micro-batches shrink too, down to one sequence.
    smallest = fit_training(config, available=memory(4.2))
    assert "memory is tight, and the run may not finish" in smallest.changes
    assert smallest.config.generator.max_num_seqs < 64
    assert 1248 <= smallest.config.trainer.max_tokens_per_microbatch < 8192


def test_an_override_is_refused_rather_than_changed() -> None:
    explicit = load_config_file("smollm2", ["trainer.device=cpu", "generator.max_num_seqs=256"])
    for fit in (fit_training, fit_inference):
        with pytest.raises(ConfigError, match=r"KV cache .*use a lower generator\.max_num_seqs"):
            fit(explicit, available=memory(8))
    lowered = fit_inference(
        load_config_file("smollm2", ["trainer.device=cpu"]), available=memory(8)
    )
    assert lowered.config.generator.max_num_seqs < 256
    assert len(lowered.changes) == 1


def test_an_override_of_more_sequences_than_ever_run_is_kept() -> None:
    few = ["trainer.device=cpu", "generator.max_num_seqs=256", "trainer.train_batch_size=4"]
    few += ["trainer.policy_mini_batch_size=4", "generator.n_samples_per_prompt=4"]
    with pytest.raises(ConfigError, match="KV cache"):  # an evaluation may run 256
        fit_training(load_config_file("smollm2", few), available=memory(8))
    few += ["trainer.eval_before_train=false", "trainer.eval_interval=-1"]
    fitted = fit_training(load_config_file("smollm2", few), available=memory(8))
    assert fitted.config.generator.max_num_seqs == 256


def test_a_resumed_run_keeps_the_settings_that_were_lowered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = load_config_file("smollm2", ["trainer.device=cpu"])
    first = fit_training(config, available=memory(8)).config
    stored = json.loads(json.dumps(list_fitted_settings(config, first)))
    for gib in (7.5, 8, 32):
        fitted = fit_resumed(config, stored, available=memory(gib))
        assert fitted.config == first
        assert fitted.config.override_keys == config.override_keys
        assert any("max_num_seqs=64 instead of 256" in change for change in fitted.changes)
        assert len(fitted.changes) == 2
    assert fit_resumed(config, {}, available=memory(32)).config == config
    # What is set otherwise than before is not kept.
    more = load_config_file("smollm2", ["trainer.device=cpu", "generator.max_num_seqs=128"])
    assert fit_resumed(more, stored, available=memory(32)).config.generator.max_num_seqs == 128
    assert caplog.text == ""


def test_a_resumed_run_says_which_settings_change(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config_file("smollm2", ["trainer.device=cpu"])
    fitted = fit_resumed(config, {}, available=memory(8))
    assert fitted == fit_training(config, available=memory(8))
    assert (
        "the run used generator.max_num_seqs=256, trainer.gradient_checkpointing=false before "
        "and uses generator.max_num_seqs=64, trainer.gradient_checkpointing=true now"
    ) in caplog.text


async def test_a_checkpoint_stores_the_settings_that_were_lowered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, "trainer.warm_start.steps=0")
    for gib in (0.82, 32):
        monkeypatch.setattr(fit_memory, "read_cpu_memory", partial(memory, gib))
        async with open_training_run(config) as run:
            assert run.rollouts.max_concurrent == 1
            saved = run.save()
        state = json.loads((saved.folder / "trainer" / "state.json").read_text())
        assert state["fitted_settings"] == {
            "generator.max_num_seqs": [16, 1],
            "trainer.gradient_checkpointing": [False, True],
            "trainer.max_tokens_per_microbatch": [2048, 1012],
        }
    assert "fitted_settings" not in TrainerState().state_dict()


def test_a_model_whose_shape_is_unknown_is_not_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path, "trainer.policy.model.path=nobody/nothing", PLAIN)
    fitted = fit_training(config, may_download=False, available=memory(1))
    assert fitted.config == config
    assert "memory is not checked" in fitted.notes()[0]


def test_a_shape_counts_the_parameters_of_the_model(tmp_path: Path) -> None:
    module = llama()
    module.config.save_pretrained(tmp_path)
    shape = read_model_shape(str(tmp_path), {})
    assert shape is not None
    assert shape == shape_of_module(module, str(tmp_path))
    assert shape.n_parameters == sum(p.numel() for p in module.parameters())
    assert shape.kv_width == 2 * 2 * 2 * 8


@pytest.mark.parametrize("build", [llama, qwen3])
@pytest.mark.parametrize("recomputes", [False, True])
def test_planned_activations_are_those_that_autograd_saves(build: Any, recomputes: bool) -> None:
    decoder = Decoder(build(), max_positions=64)
    weights = {p.untyped_storage().data_ptr() for p in decoder.module.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in weights and x.is_floating_point():
            saved[x.untyped_storage().data_ptr()] = x
        return x

    sequences = [tuple((7 * i + start) % 60 + 1 for i in range(64)) for start in (1, 2, 3)]
    attention = PackedAttention(sequences, torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        hidden = decoder.hidden(
            attention.token_ids_T, attention.positions_T, attention, recompute=recomputes
        )
    per_token = sum(x.untyped_storage().nbytes() for x in saved.values()) / 4 / len(hidden)
    planned = activations_per_token(shape_of_module(decoder.module, ""), recomputes=recomputes)
    n_layers, width = DIMENSIONS["num_hidden_layers"], DIMENSIONS["hidden_size"]
    if recomputes:
        assert per_token <= (n_layers + 3) * width < planned
    else:
        assert planned == pytest.approx(per_token, rel=0.1)
