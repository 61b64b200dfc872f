"""Small chat templates in the formats of Llama 3, Kimi K2, GLM and gpt-oss.

They say what the makers' templates say on the conversations of these tests.
"""

from __future__ import annotations

LLAMA3_MARKS = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>"),
)
LLAMA3 = r"""
{%- set instructions = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n' }}
{{- 'Environment: ipython\n' if tools }}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' + (date_string or '26 Jul 2024') }}
{{- '\n\n' + instructions + '<|eot_id|>' }}
{%- for m in rest %}
    {{- '<|start_header_id|>' + {'tool': 'ipython'}.get(m.role, m.role) }}
    {{- '<|end_header_id|>\n\n' }}
    {%- if loop.first and tools %}
        {{- 'Given the following functions, please respond with a JSON for a function call with ' }}
        {{- 'its proper arguments that best answers the given prompt.\n\nRespond in the format ' }}
        {{- '{"name": function name, "parameters": dictionary of argument name and its value}.' }}
        {{- 'Do not use variables.\n\n' }}
        {%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{% endfor %}
    {%- endif %}
    {%- if m.tool_calls %}
        {%- set call = m.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- elif m.role == 'tool' %}
        {{- m.content | tojson }}
    {%- else %}
        {{- m.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' if add_generation_prompt }}
"""

KIMI_K2_TOKENS = (
    *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "[EOS]"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
KIMI_K2 = r"""
{%- if tools %}
    {{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson(separators=SEPARATORS) }}
    {{- '<|im_end|>' }}
{%- endif %}
{%- if messages[0].role != 'system' %}
    {{- '<|im_system|>system<|im_middle|>You are kind.<|im_end|>' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|im_' + {'tool': 'system'}.get(m.role, m.role) + '|>' + m.role + '<|im_middle|>' }}
    {{- 'THOUGHT' if m.role == 'assistant' }}
    {{- '## Return of ' + m.tool_call_id + '\n' if m.role == 'tool' }}
    {{- m.content }}
    {%- if m.tool_calls %}
        {{- '<|tool_calls_section_begin|>' }}
        {%- for call in m.tool_calls %}
            {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
            {{- call.function.arguments | tojson + '<|tool_call_end|>' }}
        {%- endfor %}
        {{- '<|tool_calls_section_end|>' }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{{- '<|im_assistant|>assistant<|im_middle|>' if add_generation_prompt }}
"""


def kimi_k2_template(*, thinks: bool, compact: bool) -> str:
    return KIMI_K2.replace("THOUGHT", "<think></think>" if thinks else "").replace(
        "SEPARATORS", "(',', ':')" if compact else "none"
    )


GLM_TOKENS = (
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "/nothink",
)
GLM = r"""
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user ' }}
    {{- 'query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n' }}
    {{- '<tools>\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\n' }}{% endfor %}
    {{- '</tools>\n\nFor each function call, output the function name and arguments within the ' }}
    {{- 'following XML format:\n<tool_call>{function-name}\n' }}
    {%- for i in ('1', '2') %}
        {{- '<arg_key>{arg-key-' + i + '}</arg_key>\n<arg_value>{arg-value-' + i }}
        {{- '}</arg_value>\n' }}
    {%- endfor %}
    {{- '...\n</tool_call>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|observation|>' if messages[loop.index0 - 1].role != 'tool' }}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- else %}
        {{- '<|' + m.role + '|>\n' + ('<think></think>' if m.role == 'assistant' else '') }}
        {{- '\n' if m.role == 'assistant' and m.content }}
        {{- m.content }}
        {{- '/nothink' if m.role == 'user' and enable_thinking is false }}
        {%- for call in m.tool_calls or [] %}
            {{- '\n<tool_call>' + call.function.name + '\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>\n<arg_value>' + value + '</arg_value>\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt }}
{{- '\n<think></think>' if add_generation_prompt and enable_thinking is false }}
"""

HARMONY_TOKENS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    "<|constrain|>",
)
HARMONY = r"""
{{- '<|start|>system<|message|>You are small.\n\nReasoning: low' }}
{{- "\nCalls to these tools must go to the commentary channel: 'functions'." if tools }}
{{- '<|end|>' }}
{%- set instructions = messages[0].content if messages[0].role == 'system' else '' %}
{%- if instructions or tools %}
    {{- '<|start|>developer<|message|>' }}
    {{- '# Instructions\n\n' + instructions + '\n\n' if instructions }}
    {%- if tools %}
        {{- '# Tools\n\n## functions\n\nnamespace functions {\n\n// Looks a word up.\n' }}
        {{- 'type look_up = (_: {\nword: string,\n}) => any;\n\n} // namespace functions' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set ns = namespace(name='') %}
{%- for m in messages if m.role != 'system' %}
    {{- '<|start|>' }}
    {%- if m.tool_calls %}
        {%- set ns.name = m.tool_calls[0].function.name %}
        {{- 'assistant to=functions.' + ns.name + '<|channel|>commentary json<|message|>' }}
        {{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- elif m.role == 'tool' %}
        {{- 'functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson + '<|end|>' }}
    {%- else %}
        {{- m.role + ('<|channel|>final' if m.role == 'assistant' else '') }}
        {{- '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' if add_generation_prompt }}
"""
