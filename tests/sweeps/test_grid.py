"""The grid of a sweep: which values, sizes and seeds, and one sentence for every mistake."""

from __future__ import annotations

from typing import Any

import pytest

from skyfleet.errors import ConfigError
from skyfleet.sweeps.grid import Variant, build_grid, split_values

LR = "trainer.policy.optimizer_config.lr"


def test_commas_outside_of_quotes_and_brackets_separate_values() -> None:
    assert split_values("[a, b],[c],'d,e',{x: 1, y: 2}") == [
        "[a, b]",
        "[c]",
        "'d,e'",
        "{x: 1, y: 2}",
    ]
    assert split_values("[a, b]") == ["[a, b]"]


def test_several_keys_are_swept_as_their_product_with_the_baseline_first() -> None:
    arguments = [f"{LR}=1e-4,3e-4", "trainer.seed=7", "trainer.algorithm.use_kl_loss=true,false"]
    grid = build_grid(arguments, n_seeds=2, data_sizes="300,100", baseline=[f"{LR}=0.0003"])
    assert grid.overrides == ("trainer.seed=7",)
    assert grid.data_sizes == (100, 300)
    assert [grid.describe(variant) for variant in grid.variants] == [
        "lr=3e-4, use_kl_loss=true, 100 tasks",
        "lr=3e-4, use_kl_loss=true, 300 tasks",
        "lr=1e-4, use_kl_loss=true, 100 tasks",
        "lr=1e-4, use_kl_loss=true, 300 tasks",
        "lr=1e-4, use_kl_loss=false, 100 tasks",
        "lr=1e-4, use_kl_loss=false, 300 tasks",
        "lr=3e-4, use_kl_loss=false, 100 tasks",
        "lr=3e-4, use_kl_loss=false, 300 tasks",
    ]
    assert grid.variants[0].overrides == [
        f"{LR}=3e-4",
        "trainer.algorithm.use_kl_loss=true",
        "data.max_train_tasks=100",
    ]


def test_keys_that_end_alike_keep_their_whole_names() -> None:
    grid = build_grid([f"{LR}=1,2", "trainer.critic.optimizer_config.lr=3,4"])
    assert "critic.optimizer_config.lr=3" in grid.describe(grid.variants[0])


def test_the_names_of_runs_are_plain_and_differ_even_if_their_values_look_alike() -> None:
    values = ("[a/b]", "[a b]", "x" * 60, "x" * 59)
    grid = build_grid([f"data.train_data={','.join(values)}"])
    slugs = [grid.slug(variant) for variant in grid.variants]
    assert len(set(slugs)) == 4
    assert all(slug.replace("-", "").replace("_", "").isalnum() for slug in slugs)
    assert grid.slug(Variant(settings=(("a.lr", "1e-4"),), data_size=100)) == "lr-1e-4-tasks-100"


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ([f"{LR}=1e-4,1e-4"], {}, f"{LR} has the value 1e-4 twice; remove one"),
        ([f"{LR}=1e-4,0.0001"], {}, f"{LR} has the value 0.0001 twice; remove one"),
        ([f"{LR}=1e-4,"], {}, f"{LR}=1e-4, has an empty value; remove the extra comma"),
        ([f"{LR}=1,2", f"{LR}=3"], {}, f"{LR} is given twice; write all its values in one"),
        ([f"{LR}=1,[2"], {}, f"{LR}='[2' is not a YAML value; quote it"),
        (["lr"], {}, "'lr' is neither a setting nor swept; write key=value or key=a,b"),
        ([f"{LR}=1,2"], {"n_seeds": 0}, "--seeds 0: a sweep needs at least one seed"),
        ([f"{LR}=1,2"], {"n_seeds": -1}, "--seeds -1: a sweep needs at least one seed"),
        ([], {}, "the sweep has one run; give a key several values"),
        ([], {"data_sizes": "100"}, "the sweep has one run; give a key several values"),
        ([], {"data_sizes": "100,100"}, "--data-sizes 100,100 has 100 twice; remove one"),
        ([], {"data_sizes": "100,0"}, "--data-sizes 100,0: '0'; write numbers, as in 100,300"),
        ([], {"data_sizes": "1e3,5"}, "--data-sizes 1e3,5: '1e3'; write numbers, as in 100,300"),
        (["trainer.seed=1,2"], {}, "trainer.seed=1,2: use --seeds"),
        (["trainer.run_name=x"], {"n_seeds": 2}, "trainer.run_name=x: the sweep names its runs"),
        (["trainer.resume_mode=none"], {"n_seeds": 2}, "a sweep resumes its runs by itself"),
        (["data.max_train_tasks=9,8"], {}, "data.max_train_tasks=9,8: use --data-sizes"),
        (
            ["data.max_train_tasks=9"],
            {"data_sizes": "1,2"},
            "data.max_train_tasks=9 and --data-sizes set the same; remove one",
        ),
        ([f"{LR}=1,2"], {"baseline": ["3"]}, "--baseline 3 is not swept; choose from 1, 2"),
        (
            [f"{LR}=1,2", "trainer.epochs=1,2"],
            {"baseline": ["1"]},
            "--baseline 1: write key=value of a swept key; these are: " + LR,
        ),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_grid(arguments, **options)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
