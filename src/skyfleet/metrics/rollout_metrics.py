"""Training metrics of one step: rewards, tokens, tool use and endings of its episodes.

docs/metrics.md lists every key with its meaning and SkyRL's and TRL's name for it. An episode whose
environment failed to open (`reset` raised) is counted as such and left out of every mean. A mean
over nothing has no key, except that the seeds' training metrics are in every row: NaN, logged as
null.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import nan
from statistics import fmean, pstdev, pvariance

from skyfleet.chat.transcript import Transcript
from skyfleet.trajectories.entry import sampled_tokens, tool_errors
from skyfleet.trajectories.trajectory import Ending, Group, Trajectory


def metric_key(*parts: str) -> str:
    """Join the parts of a key. `("reward", "a/b", "signal_ratio")` gives `reward/a_b/signal_ratio`."""
    return "/".join(part.replace("/", "_") for part in parts)


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards and pass rates over all groups, and per environment.

    The n of `pass_at_n` is the number of attempts in the largest group. Ungraded attempts are
    counted in `reward/unknown_grades` and are in no other number.
    """
    unknown = sum(len(group.trajectories) - len(group.graded) for group in groups)
    metrics = {
        metric_key("reward", "unknown_grades"): float(unknown),
        metric_key("generation", "avg_reward"): nan,
        metric_key("generation", "success_rate"): nan,
        metric_key("reward", "avg_raw_reward"): nan,
    }
    graded = [group for group in groups if group.graded]
    if not graded:
        return metrics
    n = max(len(group.trajectories) for group in groups)
    rewards = [reward for group in graded for reward in group.rewards]
    metrics[metric_key("generation", "avg_reward")] = fmean(rewards)
    metrics[metric_key("generation", "success_rate")] = fmean(
        attempt.success is True for group in graded for attempt in group.graded
    )
    metrics[metric_key("reward", f"avg_pass_at_{n}")] = _pass_rate(graded)
    metrics[metric_key("reward", "avg_raw_reward")] = fmean(rewards)
    metrics[metric_key("reward", "mean_positive_reward")] = mean_positive_reward(rewards)
    by_env: dict[str, list[Group]] = defaultdict(list)
    for group in graded:
        by_env[group.env_key].append(group)
    for env_key, env_groups in sorted(by_env.items()):
        metrics[metric_key("reward", env_key, f"pass_at_{n}")] = _pass_rate(env_groups)
        rewards_by_prompt = [group.rewards for group in env_groups]
        for name, value in signal_metrics(rewards_by_prompt).items():
            metrics[metric_key("reward", env_key, name)] = value
    return metrics


def trained_reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`train/*`: rewards of the groups that remain after all filters, which the learner trains on."""
    rewards = [reward for group in groups for reward in group.rewards] or [nan]
    return {
        metric_key("train", "avg_reward"): fmean(rewards),
        metric_key("train", "min_reward"): min(rewards),
        metric_key("train", "max_reward"): max(rewards),
    }


def signal_metrics(rewards_by_prompt: Sequence[Sequence[float]]) -> dict[str, float]:
    """`mean_positive_reward`, and how much the rewards of one prompt's attempts differ.

    `variance_per_prompt` is the mean population variance over prompts with two graded attempts or
    more; `signal_ratio` is the share of these prompts whose variance is above zero.
    """
    metrics: dict[str, float] = {}
    if rewards := [reward for prompt in rewards_by_prompt for reward in prompt]:
        metrics["mean_positive_reward"] = mean_positive_reward(rewards)
    # statistics.pvariance is exact, so three rewards of 0.1 have variance 0.
    if variances := [pvariance(prompt) for prompt in rewards_by_prompt if len(prompt) > 1]:
        metrics["variance_per_prompt"] = fmean(variances)
        metrics["signal_ratio"] = fmean(variance > 0 for variance in variances)
    return metrics


def mean_positive_reward(rewards: Iterable[float]) -> float:
    """Mean of max(reward, 0) over all attempts, as SkyRL computes it. (-1, 0, 0.5, 1) gives 0.375."""
    return fmean(max(reward, 0.0) for reward in rewards)


def _pass_rate(groups: Sequence[Group]) -> float:
    return fmean(any(attempt.success for attempt in group.graded) for group in groups)


def episode_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Endings, tokens, malformed calls, and turns and tool use over all and per environment."""
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    malformed = [
        bool(turn.action.malformed_calls) for episode in episodes for turn in episode.turns
    ]
    failure_rate = fmean(malformed) if malformed else nan
    metrics = {metric_key("reward", "parse_failure_rate"): failure_rate}
    if not episodes:
        return metrics
    metrics |= {**_ending_metrics(episodes), **_token_metrics(episodes)}
    by_env: dict[str, list[Trajectory]] = defaultdict(list)
    for episode in episodes:
        by_env[episode.env_key].append(episode)
    for env_key, env_episodes in sorted(by_env.items()):
        # The framework's own names win over an `info` value of the same name.
        values = {**_info_means(env_episodes), **_tool_use(env_episodes)}
        if n_failed := sum(map(_env_init_failed, env_episodes)):
            values["env_init_failed"] = float(n_failed)
        if n_abandoned := sum(map(_was_abandoned, env_episodes)):
            values["abandoned_calls"] = float(n_abandoned)
        values |= _user_failures(env_episodes)
        metrics |= {metric_key("environment", env_key, name): v for name, v in values.items()}
    overall = _tool_use(episodes)
    overall["total_episodes"] = overall.pop("num_episodes")
    overall["total_env_init_failed"] = float(sum(map(_env_init_failed, episodes)))
    return metrics | {metric_key("environment", name): value for name, value in overall.items()}


def _ending_metrics(episodes: Sequence[Trajectory]) -> dict[str, float]:
    counts = Counter(episode.ending for episode in episodes)
    rates = {
        metric_key("generate", f"ending_{ending}"): counts[ending] / len(episodes)
        for ending in Ending
    }
    return rates | {metric_key("generate", "trajectory_timeouts"): float(counts[Ending.TIMEOUT])}


def _token_metrics(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """SkyRL's token counts per episode; episodes of a chat API have no tokens to count.

    `*_num_tokens` counts the whole response: every token after the prompt, sampled or inserted by
    the environment. `*_assistant_tokens` counts the sampled ones.
    """
    with_tokens = [episode for episode in episodes if episode.transcripts]
    if not with_tokens:
        return {}
    responses = [sum(map(_response_length, episode.transcripts)) for episode in with_tokens]
    metrics = {
        **_spread("num_tokens", responses),
        **_spread("assistant_tokens", [sampled_tokens(episode) for episode in with_tokens]),
    }
    rewarded = [(n, e.reward) for n, e in zip(responses, with_tokens, strict=True)]
    if positive := [n for n, reward in rewarded if reward is not None and reward > 0]:
        metrics[metric_key("generate", "avg_tokens_non_zero_rewards")] = fmean(positive)
    if zero := [n for n, reward in rewarded if reward == 0]:
        metrics[metric_key("generate", "avg_tokens_zero_rewards")] = fmean(zero)
    return metrics


def _response_length(transcript: Transcript) -> int:
    """Tokens from the first sampled one to the last: SkyRL cuts off the observation at the end."""
    mask = list(transcript.loss_mask)
    if True not in mask:
        return 0
    return len(mask) - mask[::-1].index(True) - mask.index(True)


def _spread(name: str, counts: Sequence[int]) -> dict[str, float]:
    return {
        metric_key("generate", f"min_{name}"): float(min(counts)),
        metric_key("generate", f"max_{name}"): float(max(counts)),
        metric_key("generate", f"avg_{name}"): fmean(counts),
        metric_key("generate", f"std_{name}"): pstdev(counts),
    }


def _tool_use(episodes: Sequence[Trajectory]) -> dict[str, float]:
    opened = [episode for episode in episodes if not _env_init_failed(episode)]
    metrics = {"num_episodes": float(len(opened))}
    if not opened:
        return metrics
    turns = [len(episode.turns) for episode in opened]
    calls = sum(len(turn.action.tool_calls) for episode in opened for turn in episode.turns)
    errors = sum(map(tool_errors, opened))
    metrics |= {
        "avg_turns": fmean(turns),
        "min_turns": float(min(turns)),
        "max_turns": float(max(turns)),
        "avg_tool_calls": calls / len(opened),
        "avg_tool_errors": errors / len(opened),
        "total_tool_errors": float(errors),
    }
    if any(turns):
        metrics["tool_calls_per_turn"] = calls / sum(turns)
    if calls:
        metrics["tool_error_rate"] = errors / calls
    return metrics


USER_PREFIX = "user_"
"""Values in `Step.info` that start so count what a simulated user took: they are summed."""
_USER_FAILURE = re.compile(r"the simulated user failed \((\w+)\)")


def _info_means(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of each value in `Step.info` over the turns that report it; a user's are summed."""
    values: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for turn in episode.turns:
            for name, value in turn.info.items():
                values[name].append(value)
    return {
        name: sum(values[name]) if name.startswith(USER_PREFIX) else fmean(values[name])
        for name in sorted(values)
    }


def _user_failures(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Episodes whose simulated user failed, which have no grade; in all and by kind."""
    counts: Counter[str] = Counter()
    for episode in episodes:
        failure = episode.failure
        if failure is not None and failure.kind == "UserFailedError":
            match = _USER_FAILURE.match(failure.detail)
            counts["user_failures"] += 1
            counts[f"user_failures_{match[1] if match else 'other'}"] += 1
    return {name: float(n) for name, n in sorted(counts.items())}


def _env_init_failed(episode: Trajectory) -> bool:
    return episode.ending is Ending.FAILED and not episode.prompt


def _was_abandoned(episode: Trajectory) -> bool:
    return episode.failure is not None and episode.failure.kind == "AbandonedCallError"
