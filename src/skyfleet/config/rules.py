"""Rules: what the keys of one configuration owe each other, and what this version cannot run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any

from skyfleet.config.gaps import GAPS
from skyfleet.config.keys import known_keys
from skyfleet.config.references import resolve
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError

Rule = Callable[[RunConfig], Iterator[str]]


def check(config: RunConfig) -> None:
    """Raise one ConfigError that names every broken rule."""
    if broken := [sentence for rule in RULES for sentence in rule(config)]:
        raise ConfigError("\n".join(broken))


def unsupported(config: RunConfig) -> list[str]:
    """A sentence for each value that is understood but cannot run yet."""
    tree = config.model_dump(mode="json")
    return [
        f"{gap.key}={value!r} does not run in this version: {gap.instead}"
        for gap in GAPS
        if (value := _value(tree, gap.key)) not in (gap.works or (_default(tree, gap.key),))
    ]


def _value(tree: Mapping[str, Any], key: str) -> Any:
    return reduce(getitem, key.split("."), tree)


def _default(tree: Mapping[str, Any], key: str) -> Any:
    return resolve(tree, known_keys()[key].default, (key,))


def _batches_divide(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    batch, mini = trainer.train_batch_size, trainer.policy_mini_batch_size
    if mini > batch:
        yield (
            f"trainer.policy_mini_batch_size={mini} is larger than "
            f"trainer.train_batch_size={batch}: no batch would fill a mini-batch; "
            f"set trainer.policy_mini_batch_size to a divisor of {batch}"
        )
    elif batch % mini:
        yield (
            f"trainer.train_batch_size={batch} is not a multiple of "
            f"trainer.policy_mini_batch_size={mini}: {batch % mini} prompts of each batch would "
            f"be dropped; set trainer.train_batch_size to {batch - batch % mini}"
        )


def _micro_batches_divide(config: RunConfig) -> Iterator[str]:
    trainer, n = config.trainer, config.generator.n_samples_per_prompt
    if trainer.max_tokens_per_microbatch > 0:
        return
    mini, micro = trainer.policy_mini_batch_size, trainer.micro_train_batch_size_per_gpu
    gpus = _policy_gpus(config)
    if mini * n % (gpus * micro):
        yield (
            f"trainer.policy_mini_batch_size={mini} x generator.n_samples_per_prompt={n} = "
            f"{mini * n} sequences do not divide into {gpus} GPUs x "
            f"trainer.micro_train_batch_size_per_gpu={micro}; "
            "set trainer.micro_train_batch_size_per_gpu=1 or another divisor"
        )


def _context_fits(config: RunConfig) -> Iterator[str]:
    prompt, context = config.trainer.max_prompt_length, config.generator.max_input_length
    turns = config.generator.max_turns
    if context < prompt or (turns == 1 and context != prompt):
        relation = "differs from" if turns == 1 else "is below"
        yield (
            f"generator.max_input_length={context} {relation} trainer.max_prompt_length={prompt} "
            f"with generator.max_turns={turns}; set trainer.max_prompt_length={context}"
        )


def _reduction_has_its_constant(config: RunConfig) -> Iterator[str]:
    algorithm, generator = config.trainer.algorithm, config.generator
    if algorithm.loss_reduction == "seq_mean_token_sum_norm" and algorithm.max_seq_len is None:
        length = generator.max_input_length + generator.sampling_params.max_generate_length
        yield (
            "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm divides by "
            f"trainer.algorithm.max_seq_len, which is unset; set it, for example to {length}: "
            "generator.max_input_length + generator.sampling_params.max_generate_length"
        )


def _kl_counts_once(config: RunConfig) -> Iterator[str]:
    algorithm = config.trainer.algorithm
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        yield (
            "trainer.algorithm.use_kl_loss=true and trainer.algorithm.use_kl_in_reward=true "
            "would count the KL twice; set one of them to false"
        )


def _engines_fill_the_gpus(config: RunConfig) -> Iterator[str]:
    generator = config.generator
    if generator.backend != "vllm" or not config.trainer.placement.colocate_all:
        return
    engines = generator.num_inference_engines
    sizes = (
        generator.inference_engine_tensor_parallel_size,
        generator.inference_engine_pipeline_parallel_size,
        generator.inference_engine_data_parallel_size,
    )
    needed, gpus = engines * sizes[0] * sizes[1] * sizes[2], _policy_gpus(config)
    if needed != gpus:
        yield (
            f"trainer.placement.colocate_all=true shares {gpus} policy GPUs with "
            f"generator.num_inference_engines={engines} x tensor {sizes[0]} x pipeline {sizes[1]} "
            f"x data {sizes[2]} = {needed} engine GPUs; make the two numbers equal"
        )


def _resuming_has_a_path(config: RunConfig) -> Iterator[str]:
    if config.trainer.resume_mode == "from_path" and not config.trainer.resume_path:
        yield "trainer.resume_mode=from_path needs trainer.resume_path; set it or use latest"


def _evaluation_names_differ(config: RunConfig) -> Iterator[str]:
    data = config.data
    named = data.val_data if isinstance(data.val_data, dict) else {"val": data.val_data}
    every = (*named.items(), ("retail_val", data.retail_val_data), *data.test_data.items())
    for name, count in Counter(name for name, sources in every if sources).items():
        if count > 1:
            yield f"data names {count} evaluation sets {name!r}; rename all but one"


def _policy_gpus(config: RunConfig) -> int:
    placement = config.trainer.placement
    return placement.policy_num_nodes * placement.policy_num_gpus_per_node


RULES: tuple[Rule, ...] = (
    _batches_divide,
    _micro_batches_divide,
    _context_fits,
    _reduction_has_its_constant,
    _kl_counts_once,
    _engines_fill_the_gpus,
    _resuming_has_a_path,
    _evaluation_names_differ,
)
