"""Which processes SkyRL's keys ask for, and what cannot be placed."""

from __future__ import annotations

from typing import Any

import pytest

from skyfleet.cluster.placement import Placement, check_fits, plan_placement
from skyfleet.config.loading import load_config
from skyfleet.errors import ClusterError, ConfigError


def place(*overrides: str, uses_gpus: bool = True) -> Placement:
    config = load_config("{}", ["trainer.placement.use_ray=true", *overrides])
    return plan_placement(config, uses_gpus=uses_gpus)


def test_one_colocated_embedded_engine_shares_the_weights_of_a_learner_in_the_driver() -> None:
    placement = place()
    assert (placement.n_ranks, placement.n_engines, placement.workers_per_node) == (0, 0, 1)


@pytest.mark.parametrize(
    "override",
    [
        "generator.num_inference_engines=2",
        "trainer.strategy=fsdp",
        "trainer.fully_async.enabled=true",
    ],
)
def test_an_engine_that_cannot_share_weights_is_an_actor(override: str) -> None:
    assert place(override, "trainer.placement.colocate_all=false").n_engines >= 1


def test_ranks_and_engines_take_the_gpus_of_the_placement_keys() -> None:
    placement = place(
        "trainer.strategy=fsdp",
        "trainer.placement.policy_num_nodes=2",
        "trainer.placement.policy_num_gpus_per_node=4",
        "trainer.placement.colocate_all=false",
        "generator.backend=vllm",
        "generator.num_inference_engines=3",
        "generator.inference_engine_tensor_parallel_size=2",
        "generator.inference_engine_pipeline_parallel_size=2",
    )
    assert placement.rank_bundles == [{"CPU": 4.0, "GPU": 4.0}] * 2
    assert placement.engine_bundles == [{"CPU": 1.0, "GPU": 4.0}] * 3


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["trainer.placement.policy_num_gpus_per_node=2"],
            "are 2 learner ranks with trainer.strategy=single; set trainer.strategy=fsdp",
        ),
        (
            ["generator.inference_engine_tensor_parallel_size=2"],
            "generator.backend=embedded runs an engine on one device",
        ),
        (
            [
                "generator.backend=vllm",
                "trainer.placement.colocate_all=false",
                "generator.inference_engine_expert_parallel_size=3",
            ],
            r"expert_parallel_size=3 is not data x tensor parallel size = 1 x 1; set it to 1",
        ),
        (
            ["generator.backend=vllm", "generator.num_inference_engines=2"],
            "colocate_all=true puts engines on the learner's GPUs, and actors with parts of a GPU",
        ),
    ],
)
def test_sizes_that_no_cluster_can_place_are_one_sentence(
    overrides: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        place(*overrides)


def placement(**fields: Any) -> Placement:
    defaults: dict[str, Any] = {
        "n_ranks": 0,
        "ranks_per_node": 1,
        "n_engines": 0,
        "gpus_per_engine": 1,
        "is_colocated": False,
        "workers_per_node": 1,
        "uses_gpus": True,
    }
    return Placement(**{**defaults, **fields})


def test_bundles_that_fit_node_by_node_are_accepted() -> None:
    asked = placement(n_ranks=4, ranks_per_node=2, n_engines=2, gpus_per_engine=2)
    check_fits(asked, [{"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 4}])


def test_gpus_that_are_enough_in_sum_and_not_on_one_node_do_not_fit() -> None:
    asked = placement(n_engines=1, gpus_per_engine=4)
    with pytest.raises(ClusterError, match="4 GPUs on one node, and the cluster of 2 nodes has"):
        check_fits(asked, [{"CPU": 8, "GPU": 2}, {"CPU": 8, "GPU": 2}])


def test_too_many_workers_for_a_node_are_named_with_their_key() -> None:
    with pytest.raises(
        ClusterError, match=r"num_rollout_workers_per_node=4 .* a node has 2; lower"
    ):
        check_fits(placement(workers_per_node=4), [{"CPU": 8}, {"CPU": 2}])
