"""Validation: checks that need several sections, and what keeps a configuration from being trained.

Checks inside one section are its `find_problems`; those that depend on the estimator or the loss are
in `skyfleet.algorithms.validation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from skyfleet.config.keys import default_at, known_keys, value_at
from skyfleet.config.root import RunConfig
from skyfleet.config.skyrl_compat import UNSUPPORTED_VALUES
from skyfleet.errors import ConfigError

Check = Callable[[RunConfig], Iterator[str]]


def check_trainable(config: RunConfig) -> None:
    """Raise one ConfigError that lists everything that keeps this configuration from being trained."""
    if problems := [*find_unsupported_values(config), *find_untrainable(config)]:
        raise ConfigError("\n".join(problems))


def find_conflicts(config: RunConfig) -> list[str]:
    """One sentence per contradiction between keys of different sections; such a file does not load."""
    return [sentence for check in CONFLICT_CHECKS for sentence in check(config)]


_COPY_COMMANDS = {
    "s3": "aws s3 cp --recursive",
    "gs": "gcloud storage cp -r",
    "az": "azcopy copy --recursive",
}


def find_unsupported_values(config: RunConfig) -> list[str]:
    """One sentence per value that loads and does not run, neither in training nor in evaluation."""
    tree, known = config.model_dump(mode="json"), known_keys()
    backend = config.generator.engine_kind
    return [
        f"{rule.key}={value!r} does not run in this version: {rule.remedy}"
        for rule in UNSUPPORTED_VALUES
        if rule.key in known
        and not rule.supports(
            value := value_at(tree, rule.key), default_at(tree, rule.key), backend
        )
    ] + [
        f"{key}={path!r} is an address, and a model is loaded from a folder: copy it with "
        f"`{_COPY_COMMANDS[scheme]} {path} models/{PurePosixPath(path).name}` and set the key to "
        "that folder"
        for key, path in _list_model_paths(config).items()
        if (scheme := path.partition("://")[0]) in _COPY_COMMANDS and "://" in path
    ]


def _list_model_paths(config: RunConfig) -> dict[str, str]:
    trainer = config.trainer
    return {
        "trainer.policy.model.path": trainer.policy.model.path,
        "trainer.ref.model.path": trainer.ref.model.path or "",
        "trainer.critic.model.path": trainer.critic.model.path or "",
    }


def find_untrainable(config: RunConfig) -> list[str]:
    """One sentence per reason why a policy that can be evaluated cannot be trained."""
    return [sentence for check in TRAINING_CHECKS for sentence in check(config)]


def check_backend_trainable(config: RunConfig) -> Iterator[str]:
    if config.generator.backend == "openai":
        yield (
            "generator.backend='openai' is inference-only: weights cannot be pushed to an "
            "OpenAI-compatible server; use `skyfleet evaluate` or `rollout`, or train with "
            "generator.backend=embedded or vllm, which may be a server with run_engines_locally=false"
        )


def check_sampling_varies(config: RunConfig) -> Iterator[str]:
    n, sampling = config.generator.n_samples_per_prompt, config.generator.sampling_params
    if n > 1 and (greedy := sampling.greedy_setting):
        yield (
            f"generator.n_samples_per_prompt={n} with generator.sampling_params.{greedy} samples the "
            f"same attempt {n} times, so every advantage is 0; set "
            "generator.sampling_params.temperature=1 without top_k"
        )


def check_tiny_reference(config: RunConfig) -> Iterator[str]:
    trainer, algorithm = config.trainer, config.trainer.algorithm
    paths = {"trainer.critic.model.path": trainer.critic.model.path}
    if algorithm.use_kl_loss or algorithm.use_kl_in_reward:
        paths["trainer.ref.model.path"] = trainer.ref.model.path
    for key, path in paths.items():
        if path == "tiny" and trainer.policy.model.path != "tiny":
            yield (
                f"{key}=tiny has random weights and the vocabulary of its tasks, so it cannot read "
                f"the tokens of trainer.policy.model.path={trainer.policy.model.path!r}; set it to "
                "that model, or to one of its family"
            )


def check_micro_batches(config: RunConfig) -> Iterator[str]:
    trainer, n = config.trainer, config.generator.n_samples_per_prompt
    mini, micro = trainer.policy_mini_batch_size, trainer.micro_train_batch_size_per_gpu
    if trainer.max_tokens_per_microbatch < 1 and mini * n % micro:
        yield (
            f"trainer.policy_mini_batch_size={mini} x generator.n_samples_per_prompt={n} = "
            f"{mini * n} sequences is not a multiple of "
            f"trainer.micro_train_batch_size_per_gpu={micro}; "
            "set trainer.micro_train_batch_size_per_gpu=1 or another divisor"
        )


def check_context_length(config: RunConfig) -> Iterator[str]:
    prompt, context = config.trainer.max_prompt_length, config.generator.max_input_length
    turns = config.generator.max_turns
    if prompt is None:
        return
    if context < prompt or (turns == 1 and context != prompt):
        relation = "differs from" if turns == 1 else "is below"
        yield (
            f"generator.max_input_length={context} {relation} trainer.max_prompt_length={prompt} "
            f"with generator.max_turns={turns}; set trainer.max_prompt_length={context}"
        )


def check_max_seq_len(config: RunConfig) -> Iterator[str]:
    algorithm, generator = config.trainer.algorithm, config.generator
    if algorithm.loss_reduction == "seq_mean_token_sum_norm" and algorithm.max_seq_len is None:
        length = generator.max_input_length + generator.sampling_params.max_generate_length
        yield (
            "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm divides by "
            f"trainer.algorithm.max_seq_len, which is unset; set it, for example to {length}: "
            "generator.max_input_length + generator.sampling_params.max_generate_length"
        )


def check_adaptive_horizon(config: RunConfig) -> Iterator[str]:
    algorithm = config.trainer.algorithm
    horizon = algorithm.kl_ctrl.horizon
    sequences = config.trainer.train_batch_size * config.generator.n_samples_per_prompt
    adapts = algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive"
    # With a low KL a step multiplies the coefficient by 1 - 0.2 * sequences / horizon.
    if adapts and sequences >= 5 * horizon:
        yield (
            f"trainer.algorithm.kl_ctrl.horizon={horizon} with {sequences} sequences per step would "
            f"take the adaptive coefficient to 0 or below; set it to {sequences} or more, so that "
            "the coefficient changes by a fifth per step at most"
        )


def check_overlong_buffer(config: RunConfig) -> Iterator[str]:
    algorithm, generator = config.trainer.algorithm, config.generator
    buffer, longest = algorithm.overlong_buffer_len, algorithm.overlong_max_len
    if buffer is None:
        return
    if longest is None and generator.max_turns > 1:
        yield (
            f"trainer.algorithm.overlong_buffer_len={buffer} with "
            f"generator.max_turns={generator.max_turns} needs trainer.algorithm.overlong_max_len: "
            "the tokens that an attempt may sample in all its turns; set it"
        )
    elif buffer > (longest := longest or generator.sampling_params.max_generate_length):
        yield (
            f"trainer.algorithm.overlong_buffer_len={buffer} is more than the {longest} tokens that "
            "an attempt may sample, so an empty answer would be penalized; set it below "
            "trainer.algorithm.overlong_max_len"
        )


def check_dynamic_sampling_group(config: RunConfig) -> Iterator[str]:
    kind = config.trainer.algorithm.dynamic_sampling.type
    if kind is not None and config.generator.n_samples_per_prompt == 1:
        yield (
            f"trainer.algorithm.dynamic_sampling.type={kind} looks for groups whose attempts earned "
            "different rewards, but generator.n_samples_per_prompt=1; set it to 2 or more"
        )


def check_asynchronous(config: RunConfig) -> Iterator[str]:
    trainer, dynamic = config.trainer, config.trainer.algorithm.dynamic_sampling.type
    if not trainer.fully_async.enabled:
        return
    if dynamic is not None:
        yield (
            f"trainer.algorithm.dynamic_sampling.type={dynamic} collects whole batches, and "
            "trainer.fully_async.enabled=true single groups; set it to null and "
            "trainer.fully_async.sample_full_batch=true"
        )
    if trainer.fully_async.sample_full_batch and config.generator.n_samples_per_prompt == 1:
        yield (
            "trainer.fully_async.sample_full_batch=true looks for groups whose attempts earned "
            "different rewards, but generator.n_samples_per_prompt=1; set it to 2 or more"
        )
    if config.generator.backend == "vllm" and trainer.placement.colocate_all:
        yield (
            "trainer.fully_async.enabled=true with generator.backend=vllm and "
            "trainer.placement.colocate_all=true: vLLM would sleep during every update; set "
            "trainer.placement.colocate_all=false"
        )


def uses_native_tool_calling(config: RunConfig) -> bool:
    """Whether messages and tools go to the engine unrendered; both sections must agree."""
    return all(get_native_flags(config).values())


def get_native_flags(config: RunConfig) -> dict[str, bool]:
    tau_bench = config.environment.skyrl_gym.tau_bench
    return {
        "generator.use_native_tool_calling": config.generator.use_native_tool_calling,
        "environment.skyrl_gym.tau_bench.use_native_tool_calling": tau_bench.use_native_tool_calling,
    }


def check_native_tool_calling(config: RunConfig) -> Iterator[str]:
    generator = config.generator
    if not uses_native_tool_calling(config):
        return
    if not generator.use_conversation_multi_turn:
        yield (
            "generator.use_conversation_multi_turn=false with generator.use_native_tool_calling="
            "true: the engine renders one message per turn; change one of them"
        )
    if generator.inject_context_status:
        yield (
            "generator.inject_context_status=true with generator.use_native_tool_calling=true: "
            "the length of a native prompt is unknown before its turn; set one of them to false"
        )


def check_demonstrations(config: RunConfig) -> Iterator[str]:
    steps = config.trainer.warm_start.steps
    if steps and not config.generator.use_conversation_multi_turn:
        yield (
            f"trainer.warm_start.steps={steps} with generator.use_conversation_multi_turn=false: "
            "a demonstration has one message per turn; set trainer.warm_start.steps=0"
        )


CONFLICT_CHECKS: tuple[Check, ...] = (
    check_micro_batches,
    check_context_length,
    check_max_seq_len,
    check_adaptive_horizon,
    check_overlong_buffer,
    check_dynamic_sampling_group,
    check_native_tool_calling,
    check_demonstrations,
    check_asynchronous,
)

TRAINING_CHECKS: tuple[Check, ...] = (
    check_backend_trainable,
    check_sampling_varies,
    check_tiny_reference,
)
