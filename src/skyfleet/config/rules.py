"""Rules: what the keys of one configuration owe each other, and what this version cannot run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from skyfleet.config.algorithm_rules import ALGORITHM_RULES
from skyfleet.config.engine_rules import ENGINE_RULES, handed_no_weights
from skyfleet.config.generator import SamplingParams
from skyfleet.config.keys import default_at, value_at
from skyfleet.config.policy_rules import POLICY_RULES, tiny_strangers
from skyfleet.config.root import RunConfig
from skyfleet.config.turn_rules import TURN_RULES
from skyfleet.config.unsupported_values import GAPS, Gap
from skyfleet.errors import ConfigError

Rule = Callable[[RunConfig], Iterator[str]]


def check(config: RunConfig) -> None:
    """Raise one ConfigError that names every broken rule."""
    if broken := [sentence for rule in RULES for sentence in rule(config)]:
        raise ConfigError("\n".join(broken))


def unsupported(config: RunConfig) -> list[str]:
    """A sentence for each value that is understood and does not run."""
    tree = config.model_dump(mode="json")
    speaks = "openai" if config.generator.is_remote else config.generator.backend
    return [
        f"{gap.key}={value!r} does not run in this version: {gap.instead}"
        for gap in GAPS
        if speaks not in gap.backends and not _runs(gap, value := value_at(tree, gap.key), tree)
    ] + list(greedy_attempts(config))


def check_trainable(config: RunConfig) -> None:
    """Raise one ConfigError that names all that keeps this policy from being trained."""
    if refused := [*unsupported(config), *untrainable(config)]:
        raise ConfigError("\n".join(refused))


def untrainable(config: RunConfig) -> list[str]:
    """Why a policy that can be played cannot be trained so."""
    rules = (handed_no_weights, _greedy_rollouts, tiny_strangers)
    return [sentence for rule in rules for sentence in rule(config)]


def greedy_attempts(config: RunConfig) -> Iterator[str]:
    """Loads, because SkyRL's recipes have it; a policy is not measured by it."""
    n, sampling = config.generator.eval_n_samples_per_prompt, config.generator.eval_sampling_params
    if n > 1 and (greedy := _greedy(sampling)):
        yield (
            f"generator.eval_n_samples_per_prompt={n} with "
            f"generator.eval_sampling_params.{greedy} would play one attempt {n} times, and "
            f"pass@{n} would be pass@1; set generator.eval_n_samples_per_prompt=1, or "
            "generator.eval_sampling_params.temperature=1 without top_k"
        )


def _greedy_rollouts(config: RunConfig) -> Iterator[str]:
    n, sampling = config.generator.n_samples_per_prompt, config.generator.sampling_params
    if n > 1 and (greedy := _greedy(sampling)):
        yield (
            f"generator.n_samples_per_prompt={n} with generator.sampling_params.{greedy} would play "
            f"one attempt {n} times and compare it with itself; set "
            "generator.sampling_params.temperature=1 without top_k"
        )


def _greedy(sampling: SamplingParams) -> str | None:
    """The setting under which every attempt at a task is the same."""
    if sampling.temperature == 0:
        return "temperature=0"
    return "top_k=1" if sampling.top_k == 1 else None


def _runs(gap: Gap, value: Any, tree: Mapping[str, Any]) -> bool:
    works = gap.works or (default_at(tree, gap.key),)
    return value in works


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


def _resuming_has_a_path(config: RunConfig) -> Iterator[str]:
    if config.trainer.resume_mode == "from_path" and not config.trainer.resume_path:
        yield "trainer.resume_mode=from_path needs trainer.resume_path; set it or use latest"


def _evaluation_names_serve(config: RunConfig) -> Iterator[str]:
    data = config.data
    named = data.val_data if isinstance(data.val_data, dict) else {"val": data.val_data}
    every = (*named.items(), ("retail_val", data.retail_val_data), *data.test_data.items())
    for name, count in Counter(name for name, sources in every if sources).items():
        if count > 1:
            yield f"data names {count} evaluation sets {name!r}; rename all but one"
        if "/" in name or name.startswith("."):
            yield (
                f"data.val_data or data.test_data names a set {name!r}, and files are named after "
                "it; leave out / and a dot at the beginning"
            )


def _policy_gpus(config: RunConfig) -> int:
    placement = config.trainer.placement
    return placement.policy_num_nodes * placement.policy_num_gpus_per_node


RULES: tuple[Rule, ...] = (
    _batches_divide,
    _micro_batches_divide,
    _context_fits,
    *ALGORITHM_RULES,
    *POLICY_RULES,
    *ENGINE_RULES,
    *TURN_RULES,
    _resuming_has_a_path,
    _evaluation_names_serve,
)
