"""Settings that contradict each other are refused, each with its remedy."""

from __future__ import annotations

import pytest

from skyfleet.chat.template import NAMED_TEMPLATES
from skyfleet.chat.tool_calls.formats import FORMATS, VLLM_NAMES
from skyfleet.config.generator import CHAT_TEMPLATES, TOOL_CALL_PARSERS
from skyfleet.config.loading import load_config
from skyfleet.config.validation import find_unsupported_values, find_untrainable
from skyfleet.errors import ConfigError

ONE_MESSAGE = "generator.use_conversation_multi_turn=false"
STATUS = "generator.inject_context_status=true"
NATIVE = (
    "generator.use_native_tool_calling=true",
    "environment.skyrl_gym.tau_bench.use_native_tool_calling=true",
)
VLLM = ("generator.backend=vllm", "trainer.micro_train_batch_size_per_gpu=1")


def broken(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config("", overrides)
    return str(caught.value)


def test_a_mini_batch_larger_than_the_batch_is_refused() -> None:
    assert broken("trainer.train_batch_size=16", "trainer.policy_mini_batch_size=32") == (
        "trainer.policy_mini_batch_size=32 is larger than trainer.train_batch_size=16; "
        "set trainer.policy_mini_batch_size to a divisor of 16"
    )


def test_a_batch_is_whole_mini_batches() -> None:
    assert broken("trainer.train_batch_size=10", "trainer.policy_mini_batch_size=4") == (
        "trainer.train_batch_size=10 is not a multiple of trainer.policy_mini_batch_size=4; "
        "set trainer.train_batch_size to 8"
    )


def test_a_mini_batch_is_whole_micro_batches_unless_tokens_fill_them() -> None:
    uneven = ("trainer.micro_train_batch_size_per_gpu=3",)  # 4 prompts x 4 attempts
    assert broken(*uneven) == (
        "trainer.policy_mini_batch_size=4 x generator.n_samples_per_prompt=4 = 16 sequences "
        "is not a multiple of trainer.micro_train_batch_size_per_gpu=3; "
        "set trainer.micro_train_batch_size_per_gpu=1 or another divisor"
    )
    load_config("", [*uneven, "trainer.max_tokens_per_microbatch=4096"])


def test_the_context_holds_the_prompt_and_with_one_turn_nothing_more() -> None:
    prompt = "trainer.max_prompt_length=512"
    assert broken("generator.max_input_length=100", prompt) == (
        "generator.max_input_length=100 is below trainer.max_prompt_length=512 "
        "with generator.max_turns=50; set trainer.max_prompt_length=100"
    )
    single = "generator.max_turns=1"
    assert "600 differs from" in broken(single, "generator.max_input_length=600", prompt)
    load_config("", [single, prompt])
    load_config("", [single, "generator.max_input_length=600"])


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


def test_servers_need_urls_and_only_servers_have_them() -> None:
    urls = "generator.remote_inference_engine_urls=[a:1,b:2]"
    assert "needs servers; set generator.remote_inference_engine_urls" in broken(
        "generator.backend=openai"
    )
    assert "needs servers" in broken(*VLLM, "generator.run_engines_locally=false")
    for problem in (broken(urls), broken(*VLLM, urls)):
        assert "drop the urls, or set generator.run_engines_locally=false with" in problem
    three = "generator.num_inference_engines=3"
    assert "names 2; drop the number" in broken("generator.backend=openai", urls, three)
    for fine in (("generator.backend=openai",), (*VLLM, "generator.run_engines_locally=false")):
        config = load_config("", [*fine, urls, "generator.num_inference_engines=2"])
        assert config.generator.is_remote
        assert find_unsupported_values(config) == []


def test_only_vllm_servers_can_be_trained() -> None:
    urls = "generator.remote_inference_engine_urls=a:1"
    (sentence,) = find_untrainable(load_config("", ["generator.backend=openai", urls]))
    assert "weights cannot be pushed to an OpenAI-compatible server" in sentence
    trained = (*VLLM, "generator.run_engines_locally=false", urls)
    assert list(find_untrainable(load_config("", trained))) == []
    apart = ("trainer.placement.colocate_all=false", "generator.weight_sync_dir=/shared")
    assert find_unsupported_values(load_config("", [*trained, *apart])) == []


def test_deltas_of_weights_need_a_place_and_have_skyrls_names() -> None:
    deltas = "generator.inference_engine.weight_sync_backend=delta"
    assert "set generator.delta_weight_sync.sync_dir=s3://bucket/run" in broken(*VLLM, deltas)
    place = "generator.inference_engine.delta_weight_sync.sync_dir=s3://bucket/run"
    generator = load_config("", [*VLLM, deltas, place]).generator
    assert generator.delta_weight_sync.sync_dir == "s3://bucket/run"
    copies = "generator.inference_engine.delta_weight_sync.local_checkpoint_dir=/tmp"
    assert "drop it: engines keep theirs in memory" in broken(*VLLM, deltas, place, copies)


def test_engine_settings_that_change_results_need_a_vllm_engine() -> None:
    keys = ("generator.engine_init_kwargs={seed: 1}", "generator.model_dtype=float32")
    assert find_unsupported_values(load_config("", [*VLLM, *keys])) == []
    assert len(find_unsupported_values(load_config("", keys))) == 2
    urls = "generator.remote_inference_engine_urls=a:1"
    for served in (
        ("generator.backend=openai", urls),
        (*VLLM, "generator.run_engines_locally=false", urls),
    ):
        assert len(find_unsupported_values(load_config("", [*served, *keys]))) == 2
    assert find_unsupported_values(load_config("", ["generator.run_engines_locally=false"])) == [
        "generator.run_engines_locally=False does not run in this version: the embedded engine runs "
        "in this process; use true, or servers: generator.backend=vllm with "
        "run_engines_locally=false, or for inference only generator.backend=openai"
    ]


@pytest.mark.parametrize("greedy", ["temperature=0", "top_k=1"])
def test_a_group_of_greedy_attempts_cannot_be_trained_on(greedy: str) -> None:
    overrides = ["trainer.algorithm.temperature=1", f"generator.sampling_params.{greedy}"]
    assert find_untrainable(load_config("", overrides)) == [
        f"generator.n_samples_per_prompt=4 with generator.sampling_params.{greedy} samples the same "
        "attempt 4 times, so every advantage is 0; set generator.sampling_params.temperature=1 "
        "without top_k"
    ]
    assert find_untrainable(load_config("", [*overrides, "generator.n_samples_per_prompt=1"])) == []
    assert (
        find_unsupported_values(load_config("", overrides)) == []
    )  # evaluation does not sample groups


def test_resuming_from_a_path_needs_one() -> None:
    assert "needs trainer.resume_path" in broken("trainer.resume_mode=from_path")


@pytest.mark.parametrize("name", ["a/b", "../up", ".hidden"])
def test_the_name_of_an_evaluation_set_is_a_file_name(name: str) -> None:
    for data in (
        f'data.val_data={{"{name}": [x.jsonl]}}',
        f'data.test_data={{"{name}": [x.jsonl]}}',
    ):
        assert f"has a set named {name!r}, and files are named after it" in broken(data)


def test_two_evaluation_sets_cannot_have_one_name() -> None:
    named = ("data.val_data={retail: [a]}", "data.test_data={retail: b}")
    assert broken(*named) == "data names 2 evaluation sets 'retail'; rename all but one"
    load_config("", ["data.test_data={val: b}"])


def test_every_conflict_is_reported_at_once() -> None:
    both = broken("trainer.train_batch_size=3", "trainer.resume_mode=from_path")
    assert len(both.splitlines()) == 2


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("trainer.ref.model.path", []),
        ("trainer.critic.model.path", ["trainer.algorithm.advantage_estimator=gae"]),
    ],
)
def test_a_tiny_reference_or_critic_needs_a_tiny_policy(key: str, overrides: list[str]) -> None:
    config = load_config("", [f"{key}=tiny", *overrides])
    (sentence,) = find_untrainable(config)
    assert sentence.startswith(f"{key}=tiny has random weights")
    assert find_unsupported_values(config) == []  # it can be evaluated
    alike = [f"{key}=tiny", "trainer.policy.model.path=tiny", *overrides]
    assert find_untrainable(load_config("", alike)) == []


def test_an_unused_reference_is_not_checked() -> None:
    asked = ["trainer.ref.model.path=tiny", "trainer.algorithm.use_kl_loss=false"]
    assert find_untrainable(load_config("", asked)) == []


def test_batched_generation_has_one_turn() -> None:
    assert broken("generator.batched=true", "generator.max_turns=50") == (
        "generator.batched=true has one turn per episode, and generator.max_turns=50; "
        "set generator.max_turns=1 or generator.batched=false"
    )
    single = load_config("", ["generator.batched=true", "generator.max_turns=1"])
    assert find_unsupported_values(single) == []


def test_native_tool_calling_needs_one_message_per_turn() -> None:
    assert "change one of them" in broken(ONE_MESSAGE, *NATIVE)
    assert "the length of a native prompt is unknown before its turn" in broken(STATUS, *NATIVE)
    # One flag has no effect.
    load_config("", [ONE_MESSAGE, STATUS, NATIVE[0]])


def test_an_unknown_parser_or_template_is_refused() -> None:
    assert broken("generator.tool_call_parser=granite").startswith(
        "generator.tool_call_parser='granite'; choose from ['glm', 'glm45', "
    )
    named = "generator.chat_template.name_or_path=qwen3_acc_thinking"
    assert broken(named) == (
        "generator.chat_template.name_or_path='qwen3_acc_thinking'; choose from "
        "['qwen3_with_thinking', 'qwen3_without_thinking'], or set "
        "generator.chat_template.source=file"
    )
    load_config("", [named, "generator.chat_template.source=file"])


def test_the_parsers_and_templates_are_those_of_the_chat_package() -> None:
    assert sorted(TOOL_CALL_PARSERS) == sorted([*FORMATS, *VLLM_NAMES])
    assert sorted(CHAT_TEMPLATES) == sorted(NAMED_TEMPLATES)


def test_demonstrations_need_one_message_per_turn() -> None:
    assert broken(ONE_MESSAGE, "trainer.warm_start.steps=5") == (
        "trainer.warm_start.steps=5 with generator.use_conversation_multi_turn=false: "
        "a demonstration has one message per turn; set trainer.warm_start.steps=0"
    )


def test_the_rollout_modes_of_the_seeds_run() -> None:
    config = load_config(
        "",
        [
            ONE_MESSAGE,
            STATUS,
            "generator.context_warning_threshold=0.8",
            "generator.step_wise_trajectories=true",
            "environment.enable_context_tools=true",
            "environment.max_output_chars=500",
            "environment.skyrl_gym.fleet_task.enable_context_tools=true",
        ],
    )
    assert find_unsupported_values(config) == []
