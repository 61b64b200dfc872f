"""Tasks that the null agent passes or the reference solution fails are reported."""

from __future__ import annotations

from tests.fakes.counter_env import CounterEnv

from skyfleet.envs.env import Env
from skyfleet.evaluation.baselines import Baseline, baseline_faults, measure_baselines
from skyfleet.rollouts.episode import Limits
from skyfleet.tasks.task import Grade, RecordedCall, Task
from skyfleet.worlds.catalog import generate_world_tasks, open_world

LIMITS = Limits(max_turns=8, max_input_length=0, trajectory_timeout_seconds=0)


class Lenient(CounterEnv):
    """Half a reward if the count is `wanted`."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self._wanted = wanted

    async def grade(self) -> Grade | None:
        return Grade(reward=0.5 * (self.count == self._wanted), success=False)


def press(key: str, *, by: int | None, env_key: str = "counter") -> Task:
    calls = () if by is None else (RecordedCall(name="press", arguments={"by": by}),)
    return Task(key=key, env_key=env_key, prompt="reach 3", solution=calls)


async def open_counter(task: Task) -> Env:
    match task.env_key:
        case "lenient":
            return Lenient(int(task.key))
        case "broken":
            return CounterEnv(breaks="grade")
    return CounterEnv()


async def measure(*tasks: Task, pass_threshold: float = 1.0) -> dict[str, Baseline]:
    return await measure_baselines(
        tasks, open_counter, LIMITS, max_concurrent=4, pass_threshold=pass_threshold
    )


async def test_a_built_in_environment_has_no_vacuous_or_impossible_tasks() -> None:
    tasks = generate_world_tasks("github", split="all", count=6)
    baselines = await measure_baselines(tasks, open_world, LIMITS, max_concurrent=6)
    assert baselines == {
        "github": Baseline(null_rate=0.0, oracle_rate=1.0, vacuous=(), impossible=())
    }
    assert list(baseline_faults(baselines)) == []


async def test_tasks_whose_reference_solution_fails_are_listed() -> None:
    baselines = await measure(press("right", by=3), press("wrong", by=2), press("worse", by=1))
    assert baselines["counter"].oracle_rate == 1 / 3
    assert baselines["counter"].impossible == ("wrong", "worse")
    assert list(baseline_faults(baselines)) == [
        "counter: the reference solutions pass only 33.3% of the tasks (wrong and 1 more fail); "
        "raise generator.max_turns or repair these tasks"
    ]


async def test_vacuous_tasks_are_found_at_the_given_pass_threshold() -> None:
    tasks = (press("0", by=None, env_key="lenient"), press("1", by=None, env_key="lenient"))
    baseline = (await measure(*tasks, pass_threshold=0.5))["lenient"]
    assert (baseline.null_rate, baseline.oracle_rate, baseline.vacuous) == (0.5, None, ("0",))
    assert list(baseline_faults({"lenient": baseline})) == [
        "lenient: 50.0% of the tasks pass when nothing is done (0); quarantine these tasks with "
        "`skyfleet tasks validate`"
    ]
    assert (await measure(*tasks))["lenient"].vacuous == ()


async def test_ungraded_attempts_are_in_no_rate() -> None:
    assert (await measure(press("a", by=3, env_key="broken")))["broken"] == Baseline(
        null_rate=None, oracle_rate=None, vacuous=(), impossible=()
    )
