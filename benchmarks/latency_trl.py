"""TRL's `GRPOTrainer` with `environment_factory` on the work of `benchmarks.gpu_latency`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.latency_work import (
    EPS_CLIP,
    LR,
    TOOL,
    Attempts,
    Notes,
    Work,
    hash_prompts,
    read_peak_gib,
    summarize,
    synchronize,
    write_words,
)

from skyfleet.chat.message import Message, ToolCall
from skyfleet.models.loading import save_model
from skyfleet.trainer.training_run import tuned_gc


def script_turns(work: Work) -> list[list[int]]:
    """The tokens that replace each turn but the last: some words and a tool call."""
    filler = work.model.tokenizer.encode(write_words(work.n_new, seed="filler"))
    turns: list[list[int]] = []
    for number in range(work.n_turns - 1):
        call = ToolCall(id="", name=TOOL.name, arguments={"topic": str(number)})
        tokens = work.renderer.render_completion(Message(role="assistant", tool_calls=(call,)))
        assert len(tokens) <= work.n_new, f"a call has {len(tokens)} tokens; raise --new-tokens"
        turns.append([*islice(cycle(filler), work.n_new - len(tokens)), *tokens])
    return turns


class StepTimes:
    """Seconds of TRL's steps, and what each step spent in its tool."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._ends: list[float] = []
        self._tools: list[dict[str, float]] = []

    def end_step(self) -> None:
        synchronize(self._work.device)
        self._ends.append(perf_counter())
        turns, latencies = range(self._work.n_turns - 1), Notes.latencies
        longest = [max((s for t, s in latencies if t == turn), default=0.0) for turn in turns]
        self._tools.append(
            {
                "inside": Notes.tool_seconds,
                "calls": len(latencies),
                "all": sum(seconds for _, seconds in latencies),
                "longest": sum(longest),
            }
        )
        Notes.tool_seconds = 0.0
        latencies.clear()

    def summarize(self, trained: Sequence[int]) -> dict[str, Any]:
        """Without the first step; `trained` are the trained tokens of the others."""
        work, tools = self._work, self._tools[1:]
        n_calls = work.n_tasks * work.n_samples * (work.n_turns - 1)
        assert {one["calls"] for one in self._tools} == {n_calls}, self._tools
        seconds = [end - begin for begin, end in pairwise(self._ends)]
        rest = [total - one["inside"] for total, one in zip(seconds, tools, strict=True)]
        whole = [one + tool["all"] for one, tool in zip(rest, tools, strict=True)]
        lower = [one + tool["longest"] for one, tool in zip(rest, tools, strict=True)]
        return {
            "measured": summarize(seconds, trained),
            "without_tools": summarize(rest, trained),
            "in_tools_seconds": round(median(tool["inside"] for tool in tools), 2),
            "computed_one_after_another": summarize(whole, trained),
            "computed_calls_overlapped": summarize(lower, trained),
        }


def measure_trl(work: Work, options: argparse.Namespace) -> dict[str, Any]:
    """TRL calls the tools of a batch one after another, so the whole latency would take minutes.

    The tool sleeps a share of it. Reported beside the measured time: the measured rest of the step
    plus all latencies (how TRL runs it), and plus the longest latency of each turn (if the calls of
    a turn ran at the same time).
    """
    if find_spec("trl") is None:
        return {"mode": "trl", "status": "trl is not installed"}
    choices = {"auto": find_spec("vllm") is not None, "vllm": True, "generate": False}
    use_vllm = choices[options.trl_backend]
    Notes.attempts, Notes.latencies = Attempts(work.n_samples), []
    Notes.scale, times = options.trl_latency_scale, StepTimes(work)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as output:
        save_model(work.model, Path(folder))
        trainer = build_trainer(work, options, times, folder, output, use_vllm=use_vllm)
        with tuned_gc():
            trainer.train()
    logged = [row for row in trainer.state.log_history if "completions/mean_length" in row]
    assert all(row["tools/call_frequency"] == work.n_turns - 1 for row in logged)
    n_episodes = work.n_tasks * work.n_samples
    trained = [round(row["completions/mean_length"] * n_episodes) for row in logged[1:]]
    return {
        "mode": "trl",
        "status": "ok",
        "backend": "vLLM colocated" if use_vllm else "transformers generate",
        "latency_scale": Notes.scale,
        "tool_calls_at_once": Notes.most_running,
        **times.summarize(trained),
        "prompt_hash": hash_prompts(work),
        "peak_gib": read_peak_gib(work.device),
        "trl": version("trl"),
    }


def build_trainer(
    work: Work,
    options: argparse.Namespace,
    times: StepTimes,
    folder: str,
    output: str,
    *,
    use_vllm: bool,
) -> Any:
    from datasets import Dataset
    from transformers import ProgressCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    turns, end_of_turn = script_turns(work), work.model.tokenizer.eos_token_id

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.end_step()

    class ScriptedTrainer(GRPOTrainer):  # type: ignore[misc]
        """An untrained model calls no tool: each sampled turn is replaced by one that does."""

        n_generated = 0

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            sampled, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            lengths = {len(one) for one in sampled}
            assert lengths == {work.n_new}, f"turns of {sorted(lengths)} tokens"
            turn = ScriptedTrainer.n_generated % work.n_turns
            ScriptedTrainer.n_generated += 1
            if turn == work.n_turns - 1:
                return [[*one[:-1], end_of_turn] for one in sampled], logprobs
            return [list(turns[turn]) for _ in sampled], logprobs

    per_device = min(options.trl_microbatch, work.n_tasks * work.n_samples)
    on_gpu = work.device.type == "cuda"
    if use_vllm:
        generation = {"ignore_eos": True, "max_tokens": work.n_new}
    else:
        generation = {"min_new_tokens": work.n_new, "max_new_tokens": work.n_new}
    trainer = ScriptedTrainer(
        model=folder,
        reward_funcs=[],
        processing_class=work.model.tokenizer,
        train_dataset=Dataset.from_dict(make_dataset(work)),
        environment_factory=Notes,
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=output,
            max_steps=1 + options.trl_steps,
            model_init_kwargs={"dtype": "bfloat16" if on_gpu else "float32"},
            bf16=on_gpu,
            use_cpu=not on_gpu,
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=work.n_tasks * work.n_samples // per_device,
            num_generations=work.n_samples,
            max_completion_length=work.episode_tokens,
            max_tool_calling_iterations=work.n_turns - 1,
            generation_kwargs=generation,
            learning_rate=LR,
            epsilon=EPS_CLIP,
            beta=0.0,
            gradient_checkpointing=False,
            use_vllm=use_vllm,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.25,
            vllm_max_model_length=2 * work.episode_tokens,
            logging_strategy="steps",
            logging_steps=1,
            report_to=[],
            save_strategy="no",
        ),
    )
    trainer.remove_callback(ProgressCallback)
    return trainer


def make_dataset(work: Work) -> dict[str, list[Any]]:
    """The same prompts as skyfleet's, token by token, with a template of TRL that shows tools."""
    from trl.chat_template_utils import qwen3_instruct_2507_chat_template

    tokenizer, tasks = work.model.tokenizer, work.make_tasks(1)
    tokenizer.chat_template = qwen3_instruct_2507_chat_template
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None or tokenizer.pad_token == tokenizer.eos_token:
        tokenizer.pad_token = "<|endoftext|>"
    prompts = [[{"role": "user", "content": task.prompt}] for task in tasks]
    theirs = tokenizer.apply_chat_template(
        prompts, tools=[Notes.look_up], add_generation_prompt=True, return_dict=False
    )
    assert theirs == list(map(work.render_prompt, tasks)), "the two sides have different prompts"
    return {"prompt": prompts, "task": [task.key for task in tasks]}
