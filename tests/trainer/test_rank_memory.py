"""The memory of one GPU of many, from shapes on the meta device, and the presets that must fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyfleet.config.loading import load_config_file
from skyfleet.config.policy import Lora
from skyfleet.models.known_shapes import build_known_model, known_models, read_known_shape
from skyfleet.models.shape import ModelShape
from skyfleet.simulation.card_profile import read_card_profile
from skyfleet.simulation.gpu_plan import plan_memory, read_shape
from skyfleet.simulation.placement import read_placement
from skyfleet.trainer.fit_ranks import plan_ranks
from skyfleet.trainer.memory_parts import MemoryPlan, Models
from skyfleet.trainer.memory_plan import plan_training
from skyfleet.trainer.rank_memory import (
    GpuLayout,
    count_shard_bytes,
    plan_engine_gpu,
    plan_learner_rank,
)

GIB = 2**30
H200 = read_card_profile("h200")
CARD_BYTES = 139 * GIB
PRESETS = ("qwen3_8b_8xh200", "qwen3_32b_8xh200", "qwen3_30b_a3b_8xh200")
PUBLISHED_BILLIONS = {"Qwen/Qwen3-8B": 8.2, "Qwen/Qwen3-32B": 32.8, "Qwen/Qwen3-30B-A3B": 30.5}


def shape_of(path: str = "Qwen/Qwen3-8B", *, rank: int = 0) -> ModelShape:
    shape = read_known_shape(path, lora=Lora(rank=rank))
    assert shape is not None
    return shape


def parts_of(plan: MemoryPlan, phase: str) -> dict[str, int]:
    index = plan.phase_names.index(phase)
    return {part.name: part.n_bytes for part in (*plan.held, *plan.phases[index])}


@pytest.mark.parametrize("path", known_models())
def test_a_known_model_has_the_parameters_that_transformers_and_its_publisher_count(
    path: str,
) -> None:
    module = build_known_model(path)
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    n_parameters = shape_of(path).n_parameters
    assert n_parameters == module.num_parameters()  # type: ignore[operator]
    assert round(n_parameters / 1e9, 1) == PUBLISHED_BILLIONS[path]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fits_an_h200_in_every_phase(name: str) -> None:
    config = load_config_file(name)
    placement = read_placement(config, 8, H200.gpus_per_node)
    plans = plan_memory(config, read_shape(config), placement, H200)
    sizes = {
        f"{role} {phase}": sum(parts_of(plan, phase).values())
        for role, plan in plans.items()
        for phase in plan.phase_names
    }
    assert sizes.keys() >= {"learner rollouts", "learner update", "learner weight sync"}
    assert max(sizes.values()) < CARD_BYTES, sizes


@pytest.mark.parametrize("rank", [0, 32])
def test_shards_of_all_ranks_are_the_whole_model(rank: int) -> None:
    shape = shape_of(rank=rank)
    alone = count_shard_bytes(shape, GpuLayout())
    for layout in (GpuLayout(shards=8), GpuLayout(shards=4, tensor=2)):
        assert 8 * count_shard_bytes(shape, layout) == pytest.approx(alone, abs=8)
    adapted = 2 * (shape.n_parameters + shape.n_adapted) + 4 * shape.n_adapter_parameters
    assert alone == (adapted if rank else 4 * shape.n_parameters)


def test_an_update_of_one_rank_by_hand() -> None:
    """Eight shards of 8.19e9 weights: float32 weights, gradients and two moments. Two layers of
    193e6 weights and the embedding and head of 1.24e9, in bfloat16 with float32 gradients."""
    config, shape = load_config_file("qwen3_8b_8xh200"), shape_of()
    update = parts_of(plan_learner_rank(config, shape, GpuLayout(shards=8)), "update")
    eighth = shape.n_parameters // 8
    assert update["float32 shards"] == update["gradients"] == pytest.approx(4 * eighth, abs=8)
    assert update["moments"] == pytest.approx(8 * eighth, abs=8)
    root = 2 * 151_936 * 4096
    assert update["gathered embedding and head"] == 6 * root
    assert update["gathered layers"] == 2 * 6 * ((shape.n_parameters - root) // 36)


def test_context_ranks_divide_the_activations_and_tensor_ranks_the_inside_of_a_layer() -> None:
    config, shape = load_config_file("qwen3_8b_8xh200"), shape_of()

    def activations(*, context: int = 1, tensor: int = 1) -> int:
        layout = GpuLayout(shards=2, context=context, tensor=tensor)
        plan = plan_learner_rank(config, shape, layout)
        return parts_of(plan, "update")["activations"]

    assert activations(context=4) == pytest.approx(activations() / 4, rel=0.001)
    assert activations() / 4 < activations(tensor=4) < activations()


def test_an_offloaded_optimizer_is_on_the_gpu_during_its_step_only() -> None:
    key = "trainer.policy.optimizer_config.offload_after_step"
    shape, layout = shape_of(), GpuLayout(shards=8)
    held, offloaded = (
        plan_learner_rank(load_config_file("qwen3_8b_8xh200", [f"{key}={value}"]), shape, layout)
        for value in ("false", "true")
    )
    assert "moments" in parts_of(held, "update")
    assert "moments" not in parts_of(offloaded, "update")
    assert parts_of(offloaded, "optimizer step")["moments"] == parts_of(held, "update")["moments"]


def test_an_engine_takes_its_share_of_the_card_and_holds_one_sequence_at_least() -> None:
    config, shape = load_config_file("qwen3_8b_8xh200"), shape_of()
    layout = GpuLayout(engine_tensor=2, card_bytes=100 * GIB, is_colocated=False)
    parts = parts_of(plan_engine_gpu(config, shape, layout), "rollouts")
    share = sum(parts.values()) - parts["CUDA and NCCL"]
    assert share == int(config.generator.gpu_memory_utilization * 100 * GIB)
    assert parts["engine's weights"] == shape.n_parameters  # two bytes on two GPUs
    small = parts_of(plan_engine_gpu(config, shape, replace(layout, card_bytes=0)), "rollouts")
    assert small["KV cache"] == config.max_episode_tokens * shape.kv_width  # half of its heads
    halved = parts_of(
        plan_engine_gpu(config, shape, replace(layout, engine_itemsize=1)), "rollouts"
    )
    assert 2 * halved["engine's weights"] == parts["engine's weights"]


def test_a_colocated_engine_samples_before_the_update_and_has_its_weights_during_the_sync() -> None:
    config, shape = load_config_file("qwen3_8b_8xh200"), shape_of()
    together = plan_learner_rank(config, shape, GpuLayout(shards=8))
    apart = plan_learner_rank(config, shape, GpuLayout(shards=8, is_colocated=False))
    assert together.phase_names == ("rollouts", "update", "weight sync")
    assert apart.phase_names == ("update", "weight sync")
    assert "KV cache" not in parts_of(together, "weight sync")
    assert "engine's weights" in parts_of(together, "weight sync")
    assert parts_of(apart, "weight sync")["transfer buckets"] == 2 * 10**9


def test_a_rank_that_torchrun_started_is_planned_with_its_part_and_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, models = load_config_file("qwen3_8b_8xh200"), Models(policy=shape_of(), on_gpu=True)
    for name, value in {
        "WORLD_SIZE": "8",
        "RANK": "0",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    eighth = plan_ranks(config, models)
    assert (
        eighth.peak_bytes
        == plan_learner_rank(
            config, models.policy, GpuLayout(shards=8, is_colocated=False)
        ).peak_bytes
    )
    assert eighth.peak_bytes < 70 * GIB
    assert plan_training(config, models, rows=1).least_bytes > 100 * GIB
