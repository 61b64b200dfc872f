"""Generator: how episodes are played, and by which engine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from skyfleet.config.section import PositiveOrMinusOne, Section, StrList


class SamplingParams(Section):
    max_generate_length: int = Field(1024, ge=1)
    """Tokens a turn."""
    temperature: float = Field(1.0, ge=0)
    """0 takes the likeliest token."""
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: PositiveOrMinusOne = -1
    """-1 keeps the whole vocabulary."""
    min_p: float = Field(0.0, ge=0, le=1)
    stop: StrList = Field([])
    """Strings that end the turn; kept in the output."""
    logprobs: Literal[0, 1] | None = 1
    """Any of the three: the chosen token's log-probability is always recorded."""

    @property
    def truncates(self) -> bool:
        """Some tokens cannot be drawn at all."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class ChatTemplate(Section):
    source: Literal["name", "file"] = "name"
    name_or_path: str | None = None
    """A template to use instead of the tokenizer's own."""


class Generator(Section):
    n_samples_per_prompt: int = Field(4, ge=1)
    """Attempts in a group: Fleet's recipe; SkyRL's default is 5."""
    eval_n_samples_per_prompt: int = Field(1, ge=1)
    """With greedy sampling every attempt at a task is the same."""
    max_turns: int = Field(50, ge=1)
    """Fleet's recipe; SkyRL's default is 1."""
    max_input_length: int = Field(512, ge=1)
    """Tokens; a turn whose prompt is longer is not begun."""
    trajectory_timeout_seconds: float = Field(900.0, ge=0)
    """0 switches it off."""
    sampling_params: SamplingParams = SamplingParams()
    eval_sampling_params: SamplingParams = SamplingParams(temperature=0.0)
    """Greedy unless said otherwise."""
    chat_template: ChatTemplate = ChatTemplate()
    chat_template_kwargs: dict[str, Any] = Field({})
    """Handed to the chat template, such as enable_thinking."""
    apply_overlong_filtering: bool = False
    """Leave attempts that were cut short out of the loss."""
    zero_reward_on_non_stop: bool = False
    """An attempt that was cut short earns nothing."""
    append_eos_token_after_stop_str_in_multi_turn: bool = True
    """Close a turn that a stop string ended; the added token is not trained on."""
    use_conversation_multi_turn: bool = True
    """Each turn is a message of its own; false writes all of them, and the world's answers, into \
one message of the assistant's."""
    batched: bool = False
    """SkyRL's single turn, with max_turns=1; requests are batched either way."""
    step_wise_trajectories: bool = False
    """One training row for each turn."""
    use_native_tool_calling: bool = False
    """Tools travel as OpenAI's definitions to a server that is played against, which renders and reads \
them; embedded and a vLLM that is trained are rendered here, and sample the same tokens as without it. \
environment.skyrl_gym.tau_bench.use_native_tool_calling must say so too."""
    reasoning_parser: str | None = None
    """vLLM's parser for thinking."""
    tool_call_parser: str | None = None
    """How calls are read: glm, harmony, hermes, json_object, kimi_k2, llama3_json, mistral, pythonic \
or qwen3_coder, or vLLM's name for one of them; null takes what the chat template writes."""
    inject_context_status: bool = False
    """Tell the agent behind each answer how much context and how many turns it has left."""
    context_warning_threshold: float = Field(0.9, gt=0, le=1)
    """Share of the context at which that becomes a warning."""

    backend: Literal["embedded", "vllm", "openai"] = "embedded"
    """embedded samples from the learner's own weights in this process, vllm from a copy that vLLM \
holds here, openai from servers; SkyRL's default is vllm."""
    num_inference_engines: int = Field(1, ge=1)
    """Several speak as one: a session stays where its cache is."""
    inference_engine_tensor_parallel_size: int = Field(1, ge=1)
    """SkyRL's default was 4 until it became 1."""
    inference_engine_pipeline_parallel_size: int = Field(1, ge=1)
    inference_engine_expert_parallel_size: int = Field(1, ge=1)
    inference_engine_data_parallel_size: int = Field(1, ge=1)
    run_engines_locally: bool = True
    """false, with backend=vllm: vLLM runs as a server somewhere, and is trained over HTTP."""
    remote_inference_engine_urls: StrList = Field([])
    """Servers with token ids, vLLM or `skyfleet serve`: http://host:port/v1 each, or host:port."""
    served_model_name: str | None = None
    """What those servers call the model; null takes the one they have."""
    async_engine: bool = True
    """Requests join and leave a running batch."""
    weight_sync_backend: Literal["nccl", "gloo", "delta"] = "nccl"
    weight_sync_dir: str | None = None
    """A folder that trainer and vLLM's servers both see, for weights on their way; null: the servers \
run on this machine, and it is in its memory. SkyRL has no such key."""
    model_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """The engine's own copy of the weights."""
    gpu_memory_utilization: float = Field(0.8, gt=0, le=1)
    enforce_eager: bool = False
    """Run without CUDA graphs."""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    max_num_batched_tokens: int = Field(8192, ge=1)
    """Tokens an engine reads in one pass."""
    max_num_seqs: int = Field(1024, ge=1)
    """Requests an engine runs at once."""
    language_model_only: bool = False
    """Skip the vision tower."""
    engine_init_kwargs: dict[str, Any] = Field({})
    """Handed to vLLM as they are."""

    @property
    def is_remote(self) -> bool:
        """Engines are servers, with weights of their own."""
        return self.backend == "openai" or (self.backend == "vllm" and not self.run_engines_locally)
