from __future__ import annotations

import pytest

from skyfleet.config.loading import load_config
from skyfleet.config.rules import unsupported, untrainable
from skyfleet.errors import ConfigError

VLLM = ("generator.backend=vllm", "trainer.micro_train_batch_size_per_gpu=1")


def broken(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config("", overrides)
    return str(caught.value)


def test_a_mini_batch_larger_than_the_batch_is_refused() -> None:
    assert broken("trainer.train_batch_size=16", "trainer.policy_mini_batch_size=32") == (
        "trainer.policy_mini_batch_size=32 is larger than trainer.train_batch_size=16: "
        "no batch would fill a mini-batch; "
        "set trainer.policy_mini_batch_size to a divisor of 16"
    )


def test_a_batch_is_whole_mini_batches() -> None:
    assert broken("trainer.train_batch_size=10", "trainer.policy_mini_batch_size=4") == (
        "trainer.train_batch_size=10 is not a multiple of trainer.policy_mini_batch_size=4: "
        "2 prompts of each batch would be dropped; set trainer.train_batch_size to 8"
    )


def test_a_mini_batch_is_whole_micro_batches_unless_tokens_fill_them() -> None:
    uneven = ("trainer.micro_train_batch_size_per_gpu=3",)  # 4 prompts x 4 attempts
    assert broken(*uneven) == (
        "trainer.policy_mini_batch_size=4 x generator.n_samples_per_prompt=4 = 16 sequences "
        "do not divide into 1 GPUs x trainer.micro_train_batch_size_per_gpu=3; "
        "set trainer.micro_train_batch_size_per_gpu=1 or another divisor"
    )
    load_config("", [*uneven, "trainer.max_tokens_per_microbatch=4096"])


def test_the_context_holds_the_prompt_and_with_one_turn_nothing_more() -> None:
    assert broken("generator.max_input_length=100") == (
        "generator.max_input_length=100 is below trainer.max_prompt_length=512 "
        "with generator.max_turns=50; set trainer.max_prompt_length=100"
    )
    assert "600 differs from" in broken("generator.max_turns=1", "generator.max_input_length=600")
    load_config("", ["generator.max_turns=1"])


def test_the_summed_reduction_needs_its_constant() -> None:
    chosen = "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm"
    assert "for example to 1536:" in broken(chosen)  # 512 + 1024
    load_config("", [chosen, "trainer.algorithm.max_seq_len=1536"])


def test_kl_counts_once() -> None:
    assert "count the KL twice" in broken("trainer.algorithm.use_kl_in_reward=true")
    load_config(
        "", ["trainer.algorithm.use_kl_in_reward=true", "trainer.algorithm.use_kl_loss=false"]
    )


def test_a_token_mask_needs_both_bounds() -> None:
    low = "trainer.algorithm.off_policy_correction.token_mask_is_threshold_low=0.5"
    assert "has one bound; set both or neither" in broken(low)


def test_length_over_several_turns_needs_a_limit_to_be_punished() -> None:
    buffer = "trainer.algorithm.overlong_buffer_len=64"
    assert "needs trainer.algorithm.overlong_max_len" in broken(buffer)
    load_config("", [buffer, "trainer.algorithm.overlong_max_len=512"])
    load_config("", [buffer, "generator.max_turns=1"])


def test_servers_are_named_where_they_speak_and_only_there() -> None:
    urls = "generator.remote_inference_engine_urls=[a:1,b:2]"
    assert "none is named; set generator.remote_inference_engine_urls" in broken(
        "generator.backend=openai"
    )
    assert "none is named" in broken(*VLLM, "generator.run_engines_locally=false")
    for said in (broken(urls), broken(*VLLM, urls)):
        assert "drop the urls, or set generator.run_engines_locally=false with" in said
    three = "generator.num_inference_engines=3"
    assert "names 2; drop the number" in broken("generator.backend=openai", urls, three)
    for fine in (("generator.backend=openai",), (*VLLM, "generator.run_engines_locally=false")):
        config = load_config("", [*fine, urls, "generator.num_inference_engines=2"])
        assert config.generator.is_remote
        assert unsupported(config) == []


def test_of_servers_only_vllms_are_trained() -> None:
    urls = "generator.remote_inference_engine_urls=a:1"
    (sentence,) = untrainable(load_config("", ["generator.backend=openai", urls]))
    assert "nothing hands new weights to them" in sentence
    trained = (*VLLM, "generator.run_engines_locally=false", urls)
    assert list(untrainable(load_config("", trained))) == []
    apart = ("trainer.placement.colocate_all=false", "generator.weight_sync_dir=/shared")
    assert unsupported(load_config("", [*trained, *apart])) == []
    assert len(unsupported(load_config("", apart))) == 2


def test_what_only_vllm_reads_is_refused_elsewhere() -> None:
    keys = ("generator.enforce_eager=true", "generator.model_dtype=float32")
    assert unsupported(load_config("", [*VLLM, *keys])) == []
    assert len(unsupported(load_config("", keys))) == 2
    urls = "generator.remote_inference_engine_urls=a:1"
    for served in (
        ("generator.backend=openai", urls),
        (*VLLM, "generator.run_engines_locally=false", urls),
    ):
        assert len(unsupported(load_config("", [*served, *keys]))) == 2
        assert unsupported(load_config("", [*served, "generator.served_model_name=mine"])) == []
    for here in ((), VLLM):
        assert unsupported(load_config("", [*here, "generator.served_model_name=mine"])) == [
            "generator.served_model_name='mine' does not run in this version: only servers are "
            "asked by name; leave it out, or have servers: generator.backend=vllm with "
            "run_engines_locally=false, or to play only generator.backend=openai"
        ]
    assert unsupported(load_config("", ["generator.num_inference_engines=2"])) == [
        "generator.num_inference_engines=2 does not run in this version: "
        "the embedded engine is one; use 1, or servers: generator.backend=vllm with "
        "run_engines_locally=false, or to play only generator.backend=openai"
    ]


def test_resuming_from_a_path_needs_one() -> None:
    assert "needs trainer.resume_path" in broken("trainer.resume_mode=from_path")


@pytest.mark.parametrize("name", ["a/b", "../up", ".hidden"])
def test_an_evaluation_set_is_named_as_a_file_may_be(name: str) -> None:
    for data in (
        f'data.val_data={{"{name}": [x.jsonl]}}',
        f'data.test_data={{"{name}": [x.jsonl]}}',
    ):
        assert f"names a set {name!r}, and files are named after it" in broken(data)


def test_two_evaluation_sets_cannot_share_a_name() -> None:
    named = ("data.val_data={retail: [a]}", "data.test_data={retail: b}")
    assert broken(*named) == "data names 2 evaluation sets 'retail'; rename all but one"
    load_config("", ["data.test_data={val: b}"])


def test_every_broken_rule_is_named_at_once() -> None:
    both = broken("trainer.train_batch_size=3", "trainer.resume_mode=from_path")
    assert len(both.splitlines()) == 2


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("trainer.ref.model.path", []),
        ("trainer.critic.model.path", ["trainer.algorithm.advantage_estimator=gae"]),
    ],
)
def test_no_tiny_model_reads_what_another_writes(key: str, words: list[str]) -> None:
    config = load_config("", [f"{key}=tiny", *words])
    (sentence,) = untrainable(config)
    assert sentence.startswith(f"{key}=tiny is made from scratch")
    assert unsupported(config) == []  # to be played, as a run's own file is
    alike = [f"{key}=tiny", "trainer.policy.model.path=tiny", *words]
    assert untrainable(load_config("", alike)) == []


def test_a_reference_that_nobody_asks_may_be_anything() -> None:
    asked = ["trainer.ref.model.path=tiny", "trainer.algorithm.use_kl_loss=false"]
    assert untrainable(load_config("", asked)) == []
