"""Generator: how episodes are sampled, and by which engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from skyfleet.config.section import PositiveOrMinusOne, Section, StrList

TOOL_CALL_PARSERS = (
    *("glm", "harmony", "hermes", "json_object", "kimi_k2", "llama3_json", "mistral", "pythonic"),
    *("qwen3_coder", "glm45", "glm47", "llama4_json", "llama4_pythonic", "openai", "qwen3_xml"),
)
"""Our names and vLLM's; a test compares them with `chat.tool_calls`, which this layer cannot import."""
CHAT_TEMPLATES = ("qwen3_with_thinking", "qwen3_without_thinking")


class SamplingParams(Section):
    max_generate_length: int = Field(1024, ge=1)
    """Tokens per turn."""
    temperature: float = Field(1.0, ge=0)
    """0 is greedy: always the most likely token."""
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: PositiveOrMinusOne = -1
    """-1 keeps the whole vocabulary."""
    min_p: float = Field(0.0, ge=0, le=1)
    stop: StrList = Field([])
    """Strings that end the turn; kept in the output."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens have no probability of being sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def greedy_setting(self) -> str | None:
        """The setting that makes every attempt at a task the same, if there is one."""
        if self.temperature == 0:
            return "temperature=0"
        return "top_k=1" if self.top_k == 1 else None


class ChatTemplate(Section):
    source: Literal["name", "file"] = "name"
    name_or_path: str | None = None
    """A template to use instead of the tokenizer's own."""


class DeltaWeightSync(Section):
    sync_dir: str | None = None
    """A folder or bucket (s3://, gs://, az://) for this run alone, to which the trainer writes versions \
of the weights and from which the engines read them."""
    max_file_size_in_gb: float = Field(1.0, gt=0)
    """Of the files that a version is written as."""


class Generator(Section):
    n_samples_per_prompt: int = Field(4, ge=1)
    """Attempts per group. Fleet's value; SkyRL's default is 5."""
    eval_n_samples_per_prompt: int = Field(1, ge=1)
    """Attempts per evaluation task; with greedy sampling they are all the same."""
    max_turns: int = Field(50, ge=1)
    """Fleet's value; 1 by default with batched=true, as in SkyRL."""
    max_input_length: int = Field(512, ge=1)
    """Tokens; an episode ends before a turn whose prompt is longer. 512 if trainer.max_prompt_length is \
unset."""
    trajectory_timeout_seconds: float = Field(900.0, ge=0)
    """0 disables the timeout."""
    sampling_params: SamplingParams = SamplingParams()
    eval_sampling_params: SamplingParams = SamplingParams(temperature=0.0)
    """Greedy by default."""
    chat_template: ChatTemplate = ChatTemplate()
    chat_template_kwargs: dict[str, Any] = Field({})
    """Passed to the chat template, such as enable_thinking."""
    apply_overlong_filtering: bool = False
    """Exclude truncated attempts from the loss."""
    zero_reward_on_non_stop: bool = False
    """Give truncated attempts reward 0."""
    append_eos_token_after_stop_str_in_multi_turn: bool = True
    """Append an EOS token to a turn that a stop string ended; it is masked from the loss."""
    use_conversation_multi_turn: bool = True
    """One message per turn; false writes all turns and observations into one assistant message."""
    batched: bool = False
    """SkyRL's single-turn mode, for max_turns=1; requests are batched in both cases."""
    step_wise_trajectories: bool = False
    """One training row per turn."""
    use_native_tool_calling: bool = False
    """Send tools as OpenAI definitions to an inference-only server, which renders and parses them. The \
embedded engine and a trained vLLM are rendered here and sample the same tokens with or without it. \
environment.skyrl_gym.tau_bench.use_native_tool_calling must be set too."""
    tool_call_parser: str | None = None
    """Format of tool calls: glm, harmony, hermes, json_object, kimi_k2, llama3_json, mistral, pythonic \
or qwen3_coder, or vLLM's name for one of them; null follows the chat template."""
    tool_call_parsing: Literal["strict", "lenient"] = "strict"
    """lenient also accepts calls of the offered tools in bare or fenced JSON, in truncated or Python-like \
JSON and in the formats of other models; each is marked as repaired and counted."""
    log_tool_call_repairs: bool = False
    """With lenient parsing: log every repaired call."""
    inject_context_status: bool = False
    """Append the remaining context and turns to each observation."""
    context_warning_threshold: float = Field(0.9, gt=0, le=1)
    """Share of used context at which that status becomes a warning."""

    backend: Literal["embedded", "vllm", "openai"] = "embedded"
    """embedded samples from the learner's own weights in this process, vllm from vLLM's copy of them, \
openai from inference-only servers. SkyRL's default is vllm."""
    num_rollout_workers_per_node: int = Field(1, ge=0)
    """With trainer.placement.use_ray: processes per node that play episodes, one CPU each; 0 plays them \
in the driver. SkyRL has no such key: its driver plays them all."""
    num_inference_engines: int = Field(1, ge=1)
    """Engines in the pool; a session stays on the engine that holds its cache."""
    inference_engine_tensor_parallel_size: int = Field(1, ge=1)
    """SkyRL's default is 1; in older versions it was 4."""
    inference_engine_pipeline_parallel_size: int = Field(1, ge=1)
    inference_engine_expert_parallel_size: int = Field(1, ge=1)
    inference_engine_data_parallel_size: int = Field(1, ge=1)
    run_engines_locally: bool = True
    """false, with backend=vllm: vLLM runs as a server and receives weights over HTTP."""
    remote_inference_engine_urls: StrList = Field([])
    """Servers that accept token ids (vLLM or `skyfleet serve`), each http://host:port/v1 or host:port."""
    served_model_name: str | None = None
    """The model's name on those servers; null takes the one they serve."""
    probe_timeout_seconds: float = Field(30.0, gt=0)
    """A server or endpoint must answer the first request, before any episode, within this time. SkyRL \
has no such key."""
    weight_sync_backend: Literal["nccl", "gloo", "delta"] = "nccl"
    """How vLLM gets weights: delta through compressed deltas in delta_weight_sync.sync_dir, for servers \
far away; otherwise by CUDA IPC on the learner's GPU, and by a file elsewhere. nccl and gloo are the \
backends of transfer groups with engines in other processes."""
    weight_transfer_threshold_cuda_ipc_GB: float = Field(1.0, gt=0)
    """Size of the buckets in which engines in other processes get weights, by CUDA IPC or broadcast."""
    delta_weight_sync: DeltaWeightSync = DeltaWeightSync()
    weight_sync_dir: str | None = None
    """A folder that the trainer and the vLLM servers share, through which weights are pushed; null uses \
this machine's memory, for servers on this machine. SkyRL has no such key."""
    model_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of the engine's copy of the weights."""
    gpu_memory_utilization: float = Field(0.8, gt=0, le=1)
    enforce_eager: bool = False
    """Run without CUDA graphs."""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    max_num_batched_tokens: int = Field(8192, ge=1)
    """Tokens per forward pass of an engine."""
    max_num_seqs: int = Field(1024, ge=1)
    """Sequences an engine runs at once."""
    engine_init_kwargs: dict[str, Any] = Field({})
    """Passed to vLLM unchanged."""

    @property
    def is_remote(self) -> bool:
        """Whether the engines are servers, which hold their own weights."""
        return self.backend == "openai" or (self.backend == "vllm" and not self.run_engines_locally)

    @property
    def engine_kind(self) -> str:
        """The backend, or openai for any server, whose engine settings are its own."""
        return "openai" if self.is_remote else self.backend

    def find_problems(self) -> Iterator[str]:
        if self.batched and self.max_turns != 1:
            yield (
                f"generator.batched=true has one turn per episode, and generator.max_turns="
                f"{self.max_turns}; set generator.max_turns=1 or generator.batched=false"
            )
        yield from self._find_server_problems()
        yield from self._find_delta_problems()
        parser, template = self.tool_call_parser, self.chat_template
        if parser is not None and parser not in TOOL_CALL_PARSERS:
            yield f"generator.tool_call_parser={parser!r}; choose from {sorted(TOOL_CALL_PARSERS)}"
        if template.source == "name" and template.name_or_path not in (None, *CHAT_TEMPLATES):
            yield (
                f"generator.chat_template.name_or_path={template.name_or_path!r}; choose from "
                f"{sorted(CHAT_TEMPLATES)}, or set generator.chat_template.source=file"
            )

    def _find_delta_problems(self) -> Iterator[str]:
        if self.weight_sync_backend == "delta" and self.delta_weight_sync.sync_dir is None:
            yield (
                "generator.weight_sync_backend='delta' needs a folder or bucket for the weights; set "
                "generator.delta_weight_sync.sync_dir=s3://bucket/run, or use nccl"
            )

    def _find_server_problems(self) -> Iterator[str]:
        urls, n_engines = self.remote_inference_engine_urls, self.num_inference_engines
        if self.is_remote and not urls:
            yield (
                f"generator.backend={self.backend!r} with generator.run_engines_locally="
                f"{str(self.run_engines_locally).lower()} needs servers; set "
                "generator.remote_inference_engine_urls=[http://host:port/v1]"
            )
        if urls and not self.is_remote:
            yield (
                f"generator.remote_inference_engine_urls={urls} names servers, and "
                f"generator.backend={self.backend!r} runs in this process; drop the urls, or set "
                "generator.run_engines_locally=false with generator.backend=vllm to train those "
                "servers, or generator.backend=openai for inference only"
            )
        if self.is_remote and urls and n_engines not in (1, len(urls)):
            yield (
                f"generator.num_inference_engines={n_engines}, and "
                f"generator.remote_inference_engine_urls names {len(urls)}; drop the number"
            )
