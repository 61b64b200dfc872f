"""Build the users of a run from `environment.user`; every message of theirs has a deadline."""

from __future__ import annotations

from zlib import crc32

from skyfleet.config.redaction import reject_missing_secrets
from skyfleet.config.root import RunConfig
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.users.llm import LLMUser, OpenModel
from skyfleet.envs.users.models import EmbeddedModels, EndpointModel, EngineModel
from skyfleet.envs.users.scenario import Scenario
from skyfleet.envs.users.scripted import RuleBasedUser, ScriptedUser
from skyfleet.envs.users.timed import TimedUser
from skyfleet.envs.users.user import User, UserFactory


def build_user_factory(config: RunConfig) -> UserFactory:
    """Return the function that makes the user of one episode; models are loaded by the first user."""
    section = config.environment.user
    open_model = _build_open_model(config) if section.user_strategy == "llm" else None

    def make_user(scenario: Scenario, session: str) -> User:
        user: User
        if open_model is not None:
            user = LLMUser(scenario, open_model, session=session)
        elif section.user_strategy == "rule_based":
            user = RuleBasedUser(scenario)
        else:
            user = ScriptedUser(scenario)
        return TimedUser(user, timeout_seconds=section.timeout_seconds)

    return make_user


def _build_open_model(config: RunConfig) -> OpenModel:
    user = config.environment.user
    if user.user_provider != "openai":
        models = EmbeddedModels(config)

        async def open_embedded(session: str) -> EngineModel:
            sampling = SamplingParams(
                max_generate_length=user.max_generate_length,
                temperature=user.temperature,
                seed=config.trainer.seed,
            )
            return await models.open_model(session, sampling)

        return open_embedded
    reject_missing_secrets("environment.user", user)
    # The section has checked that both are set.
    url, model = user.base_url or "", user.user_model or ""
    api_key = user.api_key.get_secret_value() if user.api_key else None

    async def open_endpoint(session: str) -> EndpointModel:
        return EndpointModel(
            url,
            model=model,
            api_key=api_key,
            sampling={
                "max_tokens": user.max_generate_length,
                "temperature": user.temperature,
                # One seed for all sessions would make every user of a scenario the same.
                "seed": crc32(f"{config.trainer.seed}/{session}".encode()) >> 1,
            },
            timeout_seconds=user.timeout_seconds,
        )

    return open_endpoint
