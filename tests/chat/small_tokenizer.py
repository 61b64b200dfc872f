"""A small byte-level tokenizer and small chat templates for it."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

CORPUS = [
    'assistant\nuser\nsystem\ntool\n\n\n  <tool_response>\n{"name": "look_up", "arguments": {}}}',
    "What is a heron? A long-legged bird. You may call one or more functions.\n\n# Tools\n\n",
] * 4

# As in Llama 3 and Qwen: line breaks stay together, whatever follows them.
WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"

CHATML_FORMAT = r"""
{%- set ns = namespace(system=none) %}
{%- if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}{% endif %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if ns.system is not none %}{{- ns.system + '\n\n' }}{% endif %}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\n' }}{% endfor %}
    {{- '</tools>\n\nFor each function call, return a json object with function name and ' }}
    {{- 'arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif ns.system is not none %}
    {{- '<|im_start|>system\n' + ns.system + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if message.reasoning_content is defined THOUGHTS %}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\n' }}{% endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\nPROMPT' }}{% endif %}
"""


def chatml_template(*, keeps_reasoning: bool = True, prompt: str = "") -> str:
    """ChatML; `keeps_reasoning=False` drops reasoning once another message follows, as Qwen3 does."""
    thoughts = "" if keeps_reasoning else "and loop.last"
    return CHATML_FORMAT.replace("THOUGHTS", thoughts).replace("PROMPT", prompt)


@cache
def small_tokenizer(
    chat_template: str | None = None, *, special_tokens: tuple[str, ...] = (), **kwargs: Any
) -> Any:
    """`marks` are special tokens beside ChatML's."""
    model = Tokenizer(BPE())
    by_words: Any = Split(Regex(WORDS), "isolated")
    by_bytes: Any = ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = Sequence([by_words, by_bytes])
    model.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=list(
            dict.fromkeys(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *special_tokens])
        ),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(CORPUS, trainer)
    return cast("Any", PreTrainedTokenizerFast)(
        tokenizer_object=model, eos_token="<|im_end|>", chat_template=chat_template, **kwargs
    )
