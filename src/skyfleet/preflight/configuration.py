"""Checks of the configuration itself: its values, and what it names."""

from __future__ import annotations

from skyfleet.algorithms.registry import build_advantage_estimator
from skyfleet.algorithms.validation import check_algorithm
from skyfleet.config.validation import find_unsupported_values, find_untrainable
from skyfleet.errors import require_torch
from skyfleet.preflight.check import CheckFailedError, Problems, Subject, check


@check("configuration", "configuration")
def check_values(subject: Subject) -> str:
    """All values that keep the configuration from training."""
    config = subject.config
    problems = Problems(*find_unsupported_values(config), *find_untrainable(config))
    problems.call(check_algorithm, config)
    problems.raise_all()
    return f"trains {config.trainer.policy.model.path} as {config.trainer.run_name}"


@check("estimator and loss", "configuration")
def check_names(subject: Subject) -> str:
    """What the configuration imports by name; the versions of packages are the machine's."""
    trainer = subject.config.trainer

    def build_loss() -> None:
        if ":" in trainer.algorithm.policy_loss_type:  # needs torch
            require_torch()
            from skyfleet.algorithms.registry import build_policy_loss

            build_policy_loss(trainer.algorithm)

    problems = Problems()
    problems.call(build_advantage_estimator, trainer.algorithm)
    problems.call(build_loss)
    problems.raise_all()
    return f"{trainer.algorithm.advantage_estimator}, {trainer.algorithm.policy_loss_type}"


@check("model", "policy", timeout_seconds=120)
def check_model(subject: Subject) -> str:
    """The configured path or name is a model; a name of Hugging Face's hub is asked for."""
    require_torch()
    from skyfleet.models.loading import check_model_config
    from skyfleet.models.shape import read_model_shape

    policy = subject.config.trainer.policy
    path, trusts = policy.model.path, policy.model.trust_remote_code
    check_model_config(path, trust_remote_code=trusts)
    shape = read_model_shape(path, policy.model_config_kwargs)
    if shape is None and not trusts:
        raise CheckFailedError(
            f"trainer.policy.model.path={path!r}: its config.json cannot be read; check the name, and "
            "for a private or gated model export HF_TOKEN"
        )
    return path if shape is None else f"{path}, {shape.n_parameters / 1e6:,.1f}M parameters"
