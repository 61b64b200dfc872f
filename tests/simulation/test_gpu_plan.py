"""A plan for many GPUs: its costs against measured tables, its refusals, its bottleneck."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from skyfleet.cli.main import app
from skyfleet.config.loading import load_config_file
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.models.known_shapes import read_known_shape
from skyfleet.models.shape import ModelShape
from skyfleet.simulation.card_costs import (
    CardEngineCosts,
    CardStepCosts,
    count_expert_share,
    dense_parameters,
)
from skyfleet.simulation.card_profile import read_card_profile
from skyfleet.simulation.gpu_plan import GpuPlanner, choose_best
from skyfleet.simulation.placement import Placement, list_placements, read_placement
from skyfleet.simulation.workload import Distribution, Lengths, Workload, parse_distribution

H200 = read_card_profile("h200")
ONE = Placement(learner_gpus=1, engine_gpus=1, is_colocated=True)
SMALL = Workload(
    source="a test",
    lengths=Lengths(
        prompt_tokens=Distribution(mean=2000),
        turns=Distribution(mean=3),
        sampled_tokens=Distribution(mean=100, sigma=0.5),
        reply_tokens=Distribution(mean=200),
    ),
    tool_seconds=Distribution(mean=1.0, sigma=0.5),
)


def shape_of(path: str) -> ModelShape:
    shape = read_known_shape(path)
    assert shape is not None
    return shape


QWEN3_8B = shape_of("Qwen/Qwen3-8B")


def engine_costs(placement: Placement = ONE, **changes: float) -> CardEngineCosts:
    settings = {"weight_bytes": 2.0, "memory_share": 0.6} | changes
    return CardEngineCosts(
        profile=H200, shape=QWEN3_8B, placement=placement, max_running=256, **settings
    )


def step_costs(shape: ModelShape = QWEN3_8B, placement: Placement = ONE) -> CardStepCosts:
    return CardStepCosts(
        profile=H200,
        shape=shape,
        placement=placement,
        micro_tokens=16_384,
        n_mini_batches=1,
        n_extra_forwards=0,
        recomputes=True,
        offloads=False,
    )


@pytest.mark.parametrize(
    ("sequences", "context", "measured_ms"),
    [(1, 32_000, 6.2), (4, 32_000, 9.2), (12, 32_000, 18.1), (16, 8_000, 8.6), (64, 8_000, 21.2)],
)
def test_decoding_costs_what_vllm_took_on_an_h200(
    sequences: int, context: int, measured_ms: float
) -> None:
    """docs/benchmarks.md, decoding behind long prompts."""
    costs = engine_costs()
    seconds = costs.step_seconds(sequences) + sequences * context * costs.context_seconds
    assert 1000 * seconds == pytest.approx(measured_ms, rel=0.1)


@pytest.mark.parametrize(
    ("sequences", "prompt", "measured_seconds"),
    [(4, 32_000, 4.8), (12, 32_000, 14.4), (16, 8_000, 3.4), (64, 8_000, 13.5)],
)
def test_prefill_costs_what_vllm_took_on_an_h200(
    sequences: int, prompt: int, measured_seconds: float
) -> None:
    seconds = sequences * engine_costs().prefill_seconds(prompt, 0)
    assert seconds == pytest.approx(measured_seconds, rel=0.05)


def test_training_costs_what_it_took_on_an_h200() -> None:
    """docs/benchmarks.md, training passes: all weights, 4 x 4,096, recomputed, 8,400 tokens/s."""
    tokens = 4 * 4096
    assert step_costs().update_seconds([4096] * 4) == pytest.approx(tokens / 8400, rel=0.06)


def test_a_fifth_cached_prompt_costs_the_rest_of_its_attention() -> None:
    costs = engine_costs()
    whole = costs.prefill_seconds(10_000, 0)
    parts = costs.prefill_seconds(2_000, 8_000) + costs.prefill_seconds(8_000, 0)
    assert parts == pytest.approx(whole)


def test_a_token_of_a_mixture_uses_a_sixteenth_of_its_experts() -> None:
    """8 of 128 experts; 3 x 48 x 2048 x 768 x 8 weights of them, and 29.0e9 in all."""
    shape = shape_of("Qwen/Qwen3-30B-A3B")
    experts, share = count_expert_share(shape)
    assert experts == pytest.approx(128 * 3 * 48 * 2048 * 768, rel=0.001)
    assert share == pytest.approx(1 / 16, rel=0.001)
    assert 3.2e9 < dense_parameters(shape) + 2 * 151_936 * 2048 < 3.5e9  # 3.3e9 are published
    assert count_expert_share(QWEN3_8B) == (0, 1.0)


def test_fp8_halves_the_weights_that_a_step_reads() -> None:
    reading = [engine_costs(weight_bytes=size).step_seconds(1) - 0.001 for size in (2.0, 1.0)]
    assert reading[0] == pytest.approx(2 * reading[1])


def test_sixteen_ranks_gather_over_the_network_and_eight_do_not() -> None:
    """16.4e9 bytes: 7/8 of them at 0.75 x 450e9, 15/16 at 0.75 x 50e9, and 36 latencies of 20 us."""
    costs = [step_costs(placement=replace(ONE, learner_gpus=n, engine_gpus=n)) for n in (8, 16)]
    n_bytes = 2 * QWEN3_8B.n_parameters
    assert costs[0]._gather_seconds() == pytest.approx(n_bytes * 7 / 8 / 337.5e9 + 0.00072)
    assert costs[1]._gather_seconds() == pytest.approx(n_bytes * 15 / 16 / 37.5e9 + 0.00072)


def config_of(*overrides: str) -> RunConfig:
    return load_config_file("qwen3_8b_8xh200", overrides)


@pytest.mark.parametrize(
    ("n_gpus", "overrides", "sentence"),
    [
        (16, (), "--gpus 16: the configuration places 8 together, which is 8"),
        (8, ("generator.num_inference_engines=3",), "set num_inference_engines=8"),
        (
            8,
            (
                "generator.inference_engine_tensor_parallel_size=3",
                "generator.num_inference_engines=2",
            ),
            "need 6 of the learner's 8",
        ),
        (
            8,
            (
                "trainer.placement.colocate_all=false",
                "trainer.placement.policy_num_gpus_per_node=4",
                "generator.num_inference_engines=4",
                "trainer.train_batch_size=1",
                "trainer.policy_mini_batch_size=1",
                "generator.n_samples_per_prompt=2",
            ),
            "are fewer than the 4 ranks that divide them; raise it",
        ),
        (
            12,
            (
                "trainer.placement.colocate_all=false",
                "generator.num_inference_engines=4",
            ),
            "12 GPUs are not whole nodes of 8; use a multiple of 8",
        ),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(
    n_gpus: int, overrides: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        read_placement(config_of(*overrides), n_gpus, gpus_per_node=8)


def test_all_placements_are_together_or_apart_in_whole_engines() -> None:
    found = list_placements(config_of("generator.inference_engine_tensor_parallel_size=2"), 8, 8)
    assert [(one.learner_gpus, one.engine_gpus) for one in found] == [
        (8, 8),
        (2, 6),
        (4, 4),
        (6, 2),
    ]
    apart = list_placements(
        config_of("trainer.fully_async.enabled=true", "trainer.placement.colocate_all=false"), 64, 8
    )
    assert [one.learner_gpus for one in apart] == [8, 16, 24, 32, 40, 48, 56]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.policy.model.path=Qwen/Qwen3-4B", "has no costs in the profile of H200"),
        ("generator.backend=embedded", "has the decoding of vllm only"),
    ],
)
def test_a_run_without_costs_is_refused(override: str, sentence: str) -> None:
    overrides = [override]
    if "embedded" in override:
        overrides += ["generator.num_inference_engines=1"]
    with pytest.raises(ConfigError, match=sentence):
        GpuPlanner(config=config_of(*overrides), profile=H200, workload=SMALL)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--gpus", "8", "--profile", "a100"), "no profile of this card is stored; use h200"),
        (("--gpus", "8", "--placements", "some"), "write config, or all"),
        (("--gpus", "8", "--tool-seconds", "soon"), "is not a time in seconds; write 0.2"),
        (("--gpus", "8", "--workload", "none.json"), "no such file"),
        (("--gpus", "8", "--profile", "none.json"), "--measure` writes one"),
    ],
)
def test_bad_options_are_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    result = CliRunner().invoke(app, ["plan", "qwen3_8b_8xh200", *arguments])
    assert sentence in str(result.exception)


def test_the_plan_names_the_best_placement_and_what_limits_it(tmp_path: Path) -> None:
    workload = tmp_path / "workload.json"
    workload.write_text(SMALL.model_dump_json())
    arguments = ("trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4")
    result = CliRunner().invoke(
        app,
        [
            *("plan", "qwen3_8b_8xh200", *arguments, "--gpus", "8", "--placements", "all"),
            *("--workload", str(workload), "--tool-seconds", "lognormal:60:0.3"),
        ],
    )
    assert result.exit_code == 0, result.output
    assert "Simulated, not measured: 8 x H200, Qwen/Qwen3-8B." in result.output
    assert "Best of 8 placements" in result.output
    assert "Environments are what limits this run first" in result.output
    assert "From data sheets, or assumed" in result.output


def test_nothing_that_exceeds_the_memory_is_chosen() -> None:
    config = config_of("generator.gpu_memory_utilization=1")
    planner = GpuPlanner(config=config, profile=H200, workload=SMALL, n_steps=1, n_seeds=1)
    plan = planner.plan(read_placement(config, 8, 8), finds_bottleneck=False)
    assert not plan.fits
    with pytest.raises(ConfigError, match="no placement fits into 140 GiB"):
        choose_best([plan])


def test_every_number_of_a_profile_says_where_it_comes_from() -> None:
    numbers = json.loads(H200.numbers.model_dump_json())
    assert all(number["note"] for number in numbers.values())
    for name, number in H200.list_numbers("measured", "fitted").items():
        assert "docs/benchmarks.md" in number.note, name


def test_times_are_read_as_a_constant_or_a_lognormal_distribution() -> None:
    assert parse_distribution("0.2", option="x") == Distribution(mean=0.2)
    assert parse_distribution("lognormal:0.2:0.5", option="x") == Distribution(mean=0.2, sigma=0.5)
