"""What a chat request demands of the response, as logits processors: a JSON format or a tool call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.renderer import Renderer
from skyfleet.errors import ModelError
from skyfleet.serving.constraint import TokenConstraint, TopLogprobs, Vocabulary
from skyfleet.serving.generation import GenerateRequest
from skyfleet.serving.json_grammar import JsonGrammar, UnsupportedSchemaError
from skyfleet.serving.requests import ApiError, ChatCompletionRequest


class GuidedDecoding:
    """Builds the processors of requests; the vocabulary is read at the first that needs it."""

    def __init__(self, renderer: Renderer, *, vocab_size: int | None) -> None:
        """`vocab_size` is None if the engine cannot constrain what it samples."""
        self._renderer, self._vocab_size = renderer, vocab_size

    def constrain(
        self, request: ChatCompletionRequest, generate: GenerateRequest
    ) -> GenerateRequest:
        grammar = self._build_grammar(request)
        if self._vocab_size is None and (grammar is not None or request.top_logprobs):
            raise ApiError(
                "response_format, tool_choice=required and top_logprobs need to see or constrain the "
                "logits, which this engine cannot; leave them out",
                param="response_format",
            )
        n_prompt = len(generate.prompt)
        processors = list(generate.sampling.logits_processors)
        if grammar is not None:
            processors.append(TokenConstraint(grammar, self._vocabulary, n_prompt=n_prompt))
        if request.top_logprobs:
            temperature = generate.sampling.temperature
            processors.append(
                TopLogprobs(request.top_logprobs, n_prompt=n_prompt, temperature=temperature)
            )
        sampling = replace(generate.sampling, logits_processors=tuple(processors))
        return replace(generate, sampling=sampling)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        assert self._vocab_size is not None
        return Vocabulary(self._renderer, self._vocab_size)

    def _build_grammar(self, request: ChatCompletionRequest) -> JsonGrammar | None:
        param = "tool_choice" if request.must_call else "response_format"
        response_format = request.response_format
        try:
            if request.must_call:
                return JsonGrammar(
                    [
                        (*self._surround(spec), _close_empty(spec.parameters))
                        for spec in request.required_specs
                    ]
                )
            if response_format.json_schema is not None:
                return JsonGrammar([("", "", response_format.json_schema.schema_)])
            if response_format.type == "json_object":
                return JsonGrammar([("", "", {"type": "object"})])
        except UnsupportedSchemaError as error:
            raise ApiError(
                f"{param}: {error}; leave the keyword out, or check the result yourself",
                param=param,
            ) from None
        return None

    def _surround(self, spec: ToolSpec) -> tuple[str, str]:
        """What the model writes before and after the arguments of a call of this tool."""
        call = Message(
            role="assistant", tool_calls=(ToolCall(id="call_0", name=spec.name, arguments={}),)
        )
        try:
            tokens = self._renderer.render_completion(call)
        except ModelError:
            tokens = []
        if tokens and tokens[-1] in self._renderer.stop_token_ids:
            tokens = tokens[:-1]
        before, braces, after = self._renderer.text(tokens).rpartition("{}")
        if not braces:
            raise ApiError(
                "tool_choice: this model does not write arguments as JSON, so a call cannot be "
                "demanded; send tool_choice='auto'",
                param="tool_choice",
            )
        return before, after


def _close_empty(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a tool's arguments; a tool with empty properties has none."""
    if parameters.get("properties") == {} and "additionalProperties" not in parameters:
        return {**parameters, "additionalProperties": False}
    return parameters


def find_top_logprobs(generate: GenerateRequest, position: int) -> Sequence[tuple[int, float]]:
    """The most likely tokens at a position of the completion; empty if not requested."""
    for processor in generate.sampling.logits_processors:
        if isinstance(processor, TopLogprobs):
            return processor.get(position)
    return ()
