"""Turn rules: what the keys that say how turns are played owe each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from skyfleet.config.root import RunConfig

TOOL_CALL_PARSERS = (
    *("glm", "harmony", "hermes", "json_object", "kimi_k2", "llama3_json", "mistral", "pythonic"),
    *("qwen3_coder", "glm45", "glm47", "llama4_json", "llama4_pythonic", "openai", "qwen3_xml"),
)
"""Our names and vLLM's. Words are read above: a test compares both lists with what is there."""
CHAT_TEMPLATES = ("qwen3_with_thinking", "qwen3_without_thinking")


def _a_batch_is_one_turn(config: RunConfig) -> Iterator[str]:
    generator = config.generator
    if generator.batched and generator.max_turns != 1:
        yield (
            f"generator.batched=true plays one turn, and generator.max_turns={generator.max_turns}; "
            "set generator.max_turns=1 or generator.batched=false"
        )


def is_native(config: RunConfig) -> bool:
    """Messages and tools go to the engine as they are; it takes the word of both sections."""
    return all(_native_flags(config).values())


def lone_native_flag(config: RunConfig) -> Iterator[str]:
    """What to tell whoever set one of the two flags; SkyRL's recipes do, and run without."""
    flags = _native_flags(config)
    if any(flags.values()) and not all(flags.values()):
        on, off = sorted(flags, key=lambda key: not flags[key])
        yield f"{on}=true does nothing while {off}=false: the renderer writes the tools; set both"


def _native_flags(config: RunConfig) -> dict[str, bool]:
    tau_bench = config.environment.skyrl_gym.tau_bench
    return {
        "generator.use_native_tool_calling": config.generator.use_native_tool_calling,
        "environment.skyrl_gym.tau_bench.use_native_tool_calling": tau_bench.use_native_tool_calling,
    }


def _native_engines_write_the_turns(config: RunConfig) -> Iterator[str]:
    generator = config.generator
    if not is_native(config):
        return
    if not generator.use_conversation_multi_turn:
        yield (
            "generator.use_conversation_multi_turn=false with generator.use_native_tool_calling="
            "true: the engine writes each turn as a message; set one of them the other way"
        )
    if generator.inject_context_status:
        yield (
            "generator.inject_context_status=true with generator.use_native_tool_calling=true: "
            "a native prompt is not measured before its turn; set one of them to false"
        )


def _names_are_known(config: RunConfig) -> Iterator[str]:
    parser, template = config.generator.tool_call_parser, config.generator.chat_template
    if parser is not None and parser not in TOOL_CALL_PARSERS:
        yield f"generator.tool_call_parser={parser!r}; choose from {sorted(TOOL_CALL_PARSERS)}"
    if template.source == "name" and template.name_or_path not in (None, *CHAT_TEMPLATES):
        yield (
            f"generator.chat_template.name_or_path={template.name_or_path!r}; choose from "
            f"{sorted(CHAT_TEMPLATES)}, or set generator.chat_template.source=file"
        )


def _demonstrations_are_messages(config: RunConfig) -> Iterator[str]:
    steps = config.trainer.warm_start.steps
    if steps and not config.generator.use_conversation_multi_turn:
        yield (
            f"trainer.warm_start.steps={steps} with generator.use_conversation_multi_turn=false: "
            "a demonstration has a message for each turn; set trainer.warm_start.steps=0"
        )


TURN_RULES: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    _a_batch_is_one_turn,
    _native_engines_write_the_turns,
    _names_are_known,
    _demonstrations_are_messages,
)
