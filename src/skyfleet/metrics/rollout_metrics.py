"""Episodes: how they went, whatever they earned.

An episode that failed before its first message was never played: it is counted as such and is in
no mean. A number that would be taken over nothing has no key.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev, pvariance

from skyfleet.trajectories.entry import sampled_tokens, tool_errors
from skyfleet.trajectories.trajectory import Ending, Group, Trajectory


def key(*parts: str) -> str:
    """What / where / which. `key("reward", "a/b", "signal_ratio")` is `reward/a_b/signal_ratio`."""
    return "/".join(part.replace("/", "_") for part in parts)


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Per environment and over all; n of `pass_at_n` is the attempts of the largest group."""
    if not groups:
        return {}
    n = max(len(group.trajectories) for group in groups)
    unknown = sum(len(group.trajectories) - len(group.graded) for group in groups)
    metrics = {key("reward", "unknown_grades"): float(unknown)}
    graded = [group for group in groups if group.graded]
    if not graded:
        return metrics
    rewards = [reward for group in graded for reward in group.rewards]
    metrics[key("generation", "avg_reward")] = fmean(rewards)
    metrics[key("generation", "success_rate")] = fmean(
        attempt.success is True for group in graded for attempt in group.graded
    )
    metrics[key("reward", f"avg_pass_at_{n}")] = _share_passed(graded)
    metrics[key("reward", "avg_raw_reward")] = fmean(rewards)
    metrics[key("reward", "mean_positive_reward")] = mean_positive(rewards)
    by_env: dict[str, list[Group]] = defaultdict(list)
    for group in graded:
        by_env[group.env_key].append(group)
    for env_key, of_env in sorted(by_env.items()):
        metrics[key("reward", env_key, f"pass_at_{n}")] = _share_passed(of_env)
        prompts = [group.rewards for group in of_env]
        for name, value in signal_metrics(prompts).items():
            metrics[key("reward", env_key, name)] = value
    return metrics


def trained_reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`train/*`: the rewards of the groups that are learned from, after every filter."""
    rewards = [reward for group in groups for reward in group.rewards]
    if not rewards:
        return {}
    return {
        key("train", "avg_reward"): fmean(rewards),
        key("train", "min_reward"): min(rewards),
        key("train", "max_reward"): max(rewards),
    }


def signal_metrics(rewards_by_prompt: Sequence[Sequence[float]]) -> dict[str, float]:
    """`mean_positive_reward`; and over prompts with two attempts or more, what there is to learn.

    `variance_per_prompt` is the mean population variance, `signal_ratio` the share above zero.
    """
    metrics: dict[str, float] = {}
    if rewards := [reward for prompt in rewards_by_prompt for reward in prompt]:
        metrics["mean_positive_reward"] = mean_positive(rewards)
    # statistics.pvariance is exact: three rewards of 0.1 have no variance, as they should.
    if variances := [pvariance(prompt) for prompt in rewards_by_prompt if len(prompt) > 1]:
        metrics["variance_per_prompt"] = fmean(variances)
        metrics["signal_ratio"] = fmean(variance > 0 for variance in variances)
    return metrics


def mean_positive(rewards: Iterable[float]) -> float:
    """Mean of the rewards above zero; zero when none is."""
    positive = [reward for reward in rewards if reward > 0]
    return fmean(positive) if positive else 0.0


def _share_passed(groups: Sequence[Group]) -> float:
    return fmean(any(attempt.success for attempt in group.graded) for group in groups)


def episode_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Turns and tools per environment, sampled tokens, malformed calls, and how episodes ended."""
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    if not episodes:
        return {}
    metrics = {**_endings(episodes), **_tokens(episodes)}
    if turns := [turn for episode in episodes for turn in episode.turns]:
        malformed = fmean(bool(turn.action.malformed_calls) for turn in turns)
        metrics[key("reward", "parse_failure_rate")] = malformed
    by_env: dict[str, list[Trajectory]] = defaultdict(list)
    for episode in episodes:
        by_env[episode.env_key].append(episode)
    for env_key, of_env in sorted(by_env.items()):
        metrics |= {key("environment", env_key, n): v for n, v in _tool_use(of_env).items()}
        if unopened := sum(map(_never_opened, of_env)):
            metrics[key("environment", env_key, "env_init_failed")] = float(unopened)
    overall = _tool_use(episodes)
    overall["total_episodes"] = overall.pop("num_episodes")
    overall["total_env_init_failed"] = float(sum(map(_never_opened, episodes)))
    return metrics | {key("environment", name): value for name, value in overall.items()}


def _endings(episodes: Sequence[Trajectory]) -> dict[str, float]:
    counts = Counter(episode.ending for episode in episodes)
    shares = {
        key("generation", f"ending_{ending}"): counts[ending] / len(episodes) for ending in Ending
    }
    return shares | {
        key("generate", "trajectory_timeouts"): float(counts[Ending.TIMEOUT]),
        key("generate", "env_init_failures"): float(sum(map(_never_opened, episodes))),
    }


def _tokens(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Tokens the policy sampled, an episode; a ChatModel's episodes have none to count."""
    spoken = [(sampled_tokens(e), e.reward) for e in episodes if e.transcripts]
    if not spoken:
        return {}
    counts = [count for count, _ in spoken]
    metrics = {
        key("generate", "min_num_tokens"): float(min(counts)),
        key("generate", "max_num_tokens"): float(max(counts)),
        key("generate", "avg_num_tokens"): fmean(counts),
        key("generate", "std_num_tokens"): pstdev(counts),
    }
    if non_zero := [count for count, reward in spoken if reward is not None and reward != 0]:
        metrics[key("generate", "avg_tokens_non_zero_rewards")] = fmean(non_zero)
    if zero := [count for count, reward in spoken if reward == 0]:
        metrics[key("generate", "avg_tokens_zero_rewards")] = fmean(zero)
    return metrics


def _tool_use(episodes: Sequence[Trajectory]) -> dict[str, float]:
    played = [episode for episode in episodes if not _never_opened(episode)]
    metrics = {"num_episodes": float(len(played))}
    if not played:
        return metrics
    turns = [len(episode.turns) for episode in played]
    calls = sum(len(turn.action.tool_calls) for episode in played for turn in episode.turns)
    errors = sum(map(tool_errors, played))
    metrics |= {
        "avg_turns": fmean(turns),
        "min_turns": float(min(turns)),
        "max_turns": float(max(turns)),
        "avg_tool_calls": calls / len(played),
        "avg_tool_errors": errors / len(played),
        "total_tool_errors": float(errors),
    }
    if any(turns):
        metrics["tool_calls_per_turn"] = calls / sum(turns)
    if calls:
        metrics["tool_error_rate"] = errors / calls
    return metrics


def _never_opened(episode: Trajectory) -> bool:
    return episode.ending is Ending.FAILED and not episode.opening
