from __future__ import annotations

import pytest

from skyfleet.chat.custom_templates import NAMED
from skyfleet.chat.tool_calls.formats import FORMATS, VLLM_NAMES
from skyfleet.config.loading import load_config
from skyfleet.config.rules import unsupported
from skyfleet.config.turn_rules import CHAT_TEMPLATES, TOOL_CALL_PARSERS, lone_native_flag
from skyfleet.errors import ConfigError

ONE_MESSAGE = "generator.use_conversation_multi_turn=false"
TOLD = "generator.inject_context_status=true"
NATIVE = (
    "generator.use_native_tool_calling=true",
    "environment.skyrl_gym.tau_bench.use_native_tool_calling=true",
)


def broken(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config("", overrides)
    return str(caught.value)


def test_a_batch_is_one_turn() -> None:
    assert broken("generator.batched=true") == (
        "generator.batched=true plays one turn, and generator.max_turns=50; "
        "set generator.max_turns=1 or generator.batched=false"
    )
    single = load_config("", ["generator.batched=true", "generator.max_turns=1"])
    assert unsupported(single) == []


def test_a_native_engine_writes_the_turns_itself() -> None:
    assert "set one of them the other way" in broken(ONE_MESSAGE, *NATIVE)
    assert "a native prompt is not measured before its turn" in broken(TOLD, *NATIVE)
    # With one flag alone nothing is native.
    load_config("", [ONE_MESSAGE, TOLD, NATIVE[0]])


def test_a_name_that_nobody_has_is_refused_before_anything_is_loaded() -> None:
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


def test_the_names_are_those_of_the_room_that_reads() -> None:
    assert sorted(TOOL_CALL_PARSERS) == sorted([*FORMATS, *VLLM_NAMES])
    assert sorted(CHAT_TEMPLATES) == sorted(NAMED)


def test_one_native_flag_alone_is_told_that_it_does_nothing() -> None:
    assert list(lone_native_flag(load_config("", NATIVE[1:]))) == [
        f"{NATIVE[1]} does nothing while {NATIVE[0].replace('true', 'false')}: "
        "the renderer writes the tools; set both"
    ]
    (sentence,) = lone_native_flag(load_config("", NATIVE[:1]))
    assert sentence.startswith(f"{NATIVE[0]} does nothing while environment.")
    assert list(lone_native_flag(load_config("", NATIVE))) == []
    assert list(lone_native_flag(load_config())) == []


def test_a_demonstration_has_a_message_for_each_turn() -> None:
    assert broken(ONE_MESSAGE, "trainer.warm_start.steps=5") == (
        "trainer.warm_start.steps=5 with generator.use_conversation_multi_turn=false: "
        "a demonstration has a message for each turn; set trainer.warm_start.steps=0"
    )


def test_the_modes_of_the_seeds_run_here() -> None:
    config = load_config(
        "",
        [
            ONE_MESSAGE,
            TOLD,
            "generator.context_warning_threshold=0.8",
            "generator.step_wise_trajectories=true",
            "environment.enable_context_tools=true",
            "environment.max_output_chars=500",
            "environment.skyrl_gym.fleet_task.enable_context_tools=true",
        ],
    )
    assert unsupported(config) == []
