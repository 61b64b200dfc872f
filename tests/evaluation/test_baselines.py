"""Tasks that the null agent passes or the reference solution fails are reported."""

from __future__ import annotations

from tests.fakes.counter_env import CounterEnv

from skyfleet.envs.env import Env
from skyfleet.errors import EnvError
from skyfleet.evaluation.baselines import (
    Baseline,
    baseline_faults,
    find_declared_baselines,
    measure_baselines,
)
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.table import score_table
from skyfleet.rollouts.episode import Limits
from skyfleet.tasks.task import NULL_SUCCESS, Grade, RecordedCall, Task
from skyfleet.trajectories.trajectory import Ending, Group, Trajectory
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


def declaring(key: str, env_key: str, null_success: bool | None) -> Task:
    metadata = {} if null_success is None else {NULL_SUCCESS: null_success}
    return Task(key=key, env_key=env_key, prompt="p", metadata=metadata)


def test_tasks_that_declare_the_null_score_need_not_be_played() -> None:
    tasks = [declaring("a", "shop", True), declaring("b", "shop", False)]
    tasks += [declaring("c", "bank", True), declaring("d", "bank", None)]
    declared = find_declared_baselines(tasks)
    # Of the bank's tasks one does not say it.
    assert list(declared) == ["shop"]
    assert (declared["shop"].null_rate, declared["shop"].oracle_rate) == (0.5, None)
    assert declared["shop"].vacuous == ("a",)


async def test_a_declared_null_score_is_not_measured() -> None:
    opened = []

    async def open_env(task: Task) -> Env:
        opened.append(task.key)
        raise EnvError("not open")

    tasks = [declaring("a", "shop", True), declaring("b", "shop", None)]
    limits = Limits(max_turns=1, max_input_length=0, trajectory_timeout_seconds=5)
    baselines = await measure_baselines(tasks, open_env, limits, max_concurrent=1)
    assert opened == ["b"]
    assert baselines["shop"].null_rate == 1.0


def test_a_report_shows_the_declared_null_score_beside_the_result() -> None:
    task = declaring("a", "shop", True)
    trajectory = Trajectory(
        task_key="a",
        env_key="shop",
        sample=0,
        prompt=(),
        turns=(),
        transcripts=(),
        ending=Ending.DONE,
        grade=Grade(reward=0.0, success=False),
    )
    group = Group(task_key="a", env_key="shop", trajectories=(trajectory,))
    report = EvalReport.from_groups("val", [group], step=0, tasks=[task])
    row = next(line for line in score_table([report]).splitlines() if " shop " in line)
    assert [cell.strip() for cell in row.split("|")][-3:-1] == ["100.0 %", ""]
