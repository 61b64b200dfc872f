"""SkyPilot: its parser, optimizer and dry run on every task file; launching, following and stopping."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyfleet.errors import ConfigError
from skyfleet.launch import sky as launch_sky
from skyfleet.launch.plan import LaunchOptions, plan_launch
from skyfleet.launch.prices import find_gpu
from skyfleet.launch.resources import (
    CLOUDS_WITHOUT_AUTODOWN,
    CLOUDS_WITHOUT_NODES,
    CLOUDS_WITHOUT_SPOT,
)
from skyfleet.launch.sky import (
    JobEnd,
    LaunchedRun,
    LaunchError,
    find_run,
    launch_task,
    list_runs,
    run_until_ended,
    stop_run,
)

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "tasks").glob("*.yaml"))
SKY_PYTHON = os.environ.get("SKYFLEET_SKY_PYTHON") or (sys.executable if find_spec("sky") else "")
needs_sky = pytest.mark.skipif(
    not SKY_PYTHON,
    reason="no SkyPilot here, which needs an older click: make launch installs it apart",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What SkyPilot makes of each task file, by its name; one process, because importing it takes 5 s."""
    folder = tmp_path_factory.mktemp("sky")
    planned = {
        "spot": LaunchOptions(spot=True, gpus="H200:8", run_name="r1"),
        "nodes": LaunchOptions(nodes=2, gpus="H100:8", run_name="r2"),
        "prime": LaunchOptions(cloud="primeintellect", run_name="r3"),
    }
    files = list(SHIPPED)
    for name, options in planned.items():
        files.append(folder / f"{name}.yaml")
        made = plan_launch("fleet_tool_use", ["trainer.seed=7"], options, root=ROOT)
        files[-1].write_text(made.text)
    home = folder / "home"
    home.mkdir()
    done = subprocess.run(
        [SKY_PYTHON, str(ROOT / "tests/launch/sky_offline.py"), *map(str, files)],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found = json.loads(line.removeprefix("RESULT "))
    return {Path(name).stem: result for name, result in found.items()}


@needs_sky
@pytest.mark.parametrize("name", [file.stem for file in SHIPPED])
def test_skypilot_parses_optimizes_and_dry_runs_a_shipped_task(
    results: dict[str, dict[str, Any]], name: str
) -> None:
    result = results[name]
    assert result["dry_run"] == [None, None]
    # The cheapest by the test's catalogue, whose prices are invented.
    price = 2.0 * (1.3 if name.endswith("8b") else 1.0)
    assert (result["best"], result["hourly"]) == ("primeintellect", pytest.approx(price))
    assert result["plain_envs"]["MODALITY"] == "computer_use"  # sky launch FILE --env MODALITY=...
    assert result["secret_names"] == ["FLEET_API_KEY", "HF_TOKEN", "WANDB_API_KEY"]
    assert result["hooks"][0]["events"] == ["stop", "preemption", "down"]
    for value in ("fleet-value", "wandb-value", "hf-value"):
        assert value not in result["shown"]


@needs_sky
def test_skypilot_plans_spot_machines_several_nodes_and_a_single_cloud(
    results: dict[str, dict[str, Any]],
) -> None:
    spot, nodes, prime = results["spot"], results["nodes"], results["prime"]
    assert spot["job_recovery"]["recover_on_exit_codes"] == [75]
    assert spot["hourly"] == pytest.approx(2.0 * 1.3 * 8 / 2)
    assert (nodes["num_nodes"], nodes["best"]) == (2, "lambda")
    assert prime["clouds"] == ["primeintellect"]


@needs_sky
def test_prices_come_from_skypilots_catalogue_cheapest_cloud_first(
    results: dict[str, dict[str, Any]],
) -> None:
    prices = results["prices"]
    assert [cloud for cloud, _ in prices["H200:1"]] == [
        "primeintellect",
        "vast",
        "runpod",
        "lambda",
        "nebius",
    ]
    assert prices["H200:1"][0][1] == pytest.approx(2.0 * 1.3)
    assert prices["H100:8"][0][1] == pytest.approx(2.0 * 8)
    rates = [rate.split("=") for rate in results["rates"]["H200:1"].split(",")]  # of two machines
    assert [cloud for cloud, _ in rates] == [cloud for cloud, _ in prices["H200:1"]]
    assert float(rates[0][1]) == pytest.approx(2 * 2.0 * 1.3)


@pytest.mark.parametrize(
    ("device", "gpu"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("2 CPU cores, x86_64", None),
    ],
)
def test_torchs_name_of_a_gpu_finds_its_name_in_the_catalogue(device: str, gpu: str | None) -> None:
    assert find_gpu(device) == gpu


@needs_sky
def test_our_table_of_what_clouds_lack_is_skypilots(results: dict[str, dict[str, Any]]) -> None:
    lacking = results["prime"]["unsupported"]
    for feature, ours in (
        ("spot_instance", CLOUDS_WITHOUT_SPOT),
        ("multi-node", CLOUDS_WITHOUT_NODES),
        ("autodown", CLOUDS_WITHOUT_AUTODOWN),
    ):
        theirs = {cloud for cloud, features in lacking.items() if feature in features}
        assert theirs == ours & lacking.keys(), feature


class CloudError(Exception):
    __module__ = "sky.exceptions"


class FakeSky:
    """SkyPilot's client with scripted answers; it records the calls."""

    class exceptions:  # noqa: N801
        class ResourcesUnavailableError(Exception): ...

        class NoCloudAccessError(Exception): ...

        class ClusterNotUpError(Exception): ...

        class ClusterDoesNotExist(ValueError): ...  # noqa: N818

        class ApiServerConnectionError(RuntimeError): ...

    class StatusRefreshMode:
        FORCE = "FORCE"

    def __init__(self, **answers: list[Any]) -> None:
        self.answers = answers
        self.calls: list[str] = []
        self.jobs = SimpleNamespace(
            launch=lambda task, name: self._answer("jobs.launch", name),
            cancel=lambda name: self._answer("jobs.cancel", name),
            queue_v2=lambda refresh: self._answer("jobs.queue"),
            tail_logs=lambda name, follow: self._answer("jobs.tail_logs", name),
        )

    def _answer(self, call: str, *arguments: object) -> Any:
        self.calls.append(" ".join([call, *map(str, arguments)]))
        script = self.answers.get(call.replace(".", "_"), [])
        answer = script.pop(0) if script else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def Task(self, **fields: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(**fields)

    def launch(self, task: Any, cluster_name: str) -> Any:
        return self._answer("launch", cluster_name)

    def exec(self, task: Any, cluster_name: str) -> Any:
        self._answer("exec", cluster_name)
        return (7, None)

    def tail_logs(self, name: str, job_id: int | None, follow: bool) -> Any:
        return self._answer("tail_logs", name, job_id)

    def down(self, name: str) -> Any:
        return self._answer("down", name)

    def status(self, names: list[str] | None = None, refresh: str = "") -> Any:
        return self._answer("status", *(names or []))

    def get(self, answer: Any) -> Any:
        return answer

    def stream_and_get(self, answer: Any) -> Any:
        return answer


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeSky]:
    def build(**answers: list[Any]) -> FakeSky:
        sky = FakeSky(**answers)
        monkeypatch.setattr(launch_sky, "import_sky", lambda: sky)
        return sky

    return build


NO_MACHINE = FakeSky.exceptions.ResourcesUnavailableError("sold out")


def test_only_a_failure_to_find_a_machine_is_tried_again(fake: Callable[..., FakeSky]) -> None:
    pauses: list[float] = []
    sky = fake(launch=[NO_MACHINE, NO_MACHINE, None])
    launch_task(None, "r1", spot=False, sleep=pauses.append)
    assert pauses == [120, 240]
    assert sky.calls == ["launch r1", "down r1", "launch r1", "down r1", "launch r1"]
    sky = fake(launch=[RuntimeError("set-up failed")])
    with pytest.raises(RuntimeError, match="set-up failed"):
        launch_task(None, "r1", spot=False, sleep=pauses.append)
    assert sky.calls == ["launch r1"]


def test_no_machine_after_all_attempts_is_one_sentence(fake: Callable[..., FakeSky]) -> None:
    fake(launch=[NO_MACHINE] * 4)
    with pytest.raises(LaunchError, match=r"no machine for r1: sold out; add clouds with --cloud"):
        launch_task(None, "r1", spot=False, sleep=lambda _: None)


def test_a_lost_machine_is_replaced_under_the_same_name(fake: Callable[..., FakeSky]) -> None:
    down = FakeSky.exceptions.ClusterNotUpError("r1")
    sky = fake(tail_logs=[101, down, 0], status=[[{"status": SimpleNamespace(value="UP")}]])
    assert run_until_ended(None, "r1", spot=False, sleep=lambda _: None) is JobEnd.SUCCEEDED
    assert [call for call in sky.calls if call.startswith("launch")] == ["launch r1"] * 2


def test_a_managed_job_is_followed_again_and_never_launched_twice(
    fake: Callable[..., FakeSky],
) -> None:
    outage = FakeSky.exceptions.ApiServerConnectionError("http://127.0.0.1:46580")
    sky = fake(jobs_tail_logs=[101, outage, 101, 0])
    assert run_until_ended(None, "r1", spot=True, sleep=lambda _: None) is JobEnd.SUCCEEDED
    assert sky.calls == ["jobs.launch r1", *["jobs.tail_logs r1"] * 4]


class RequestException(OSError):  # noqa: N818
    __module__ = "requests.exceptions"


class ChunkedEncodingError(RequestException):
    """As `requests` has it: no ConnectionError of Python's."""

    __module__ = "requests.exceptions"


def test_a_lost_connection_is_taken_up_again_and_other_errors_are_not(
    fake: Callable[..., FakeSky],
) -> None:
    lost = ChunkedEncodingError("connection broken")
    sky = fake(tail_logs=[lost, 101, 0], status=[lost])
    assert run_until_ended(None, "r1", spot=False, sleep=lambda _: None) is JobEnd.SUCCEEDED
    assert [call for call in sky.calls if call.startswith("launch")] == ["launch r1"]
    fake(tail_logs=[OSError("disk")])
    with pytest.raises(OSError, match="disk"):
        run_until_ended(None, "r1", spot=False, sleep=lambda _: None)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (CloudError("no\n  route"), "SkyPilot: CloudError: no route"),
        (
            FakeSky.exceptions.NoCloudAccessError("none enabled"),
            "export a key such as LAMBDA_API_KEY",
        ),
    ],
)
def test_skypilots_errors_become_one_sentence(
    fake: Callable[..., FakeSky], error: Exception, sentence: str
) -> None:
    fake(launch=[error])
    with pytest.raises(LaunchError, match=sentence):
        launch_task(None, "r1", spot=False)


@pytest.mark.parametrize(
    ("code", "end"), [(0, JobEnd.SUCCEEDED), (100, JobEnd.FAILED), (103, JobEnd.CANCELLED)]
)
def test_a_job_that_ended_is_not_launched_again(
    fake: Callable[..., FakeSky], code: int, end: JobEnd
) -> None:
    sky = fake(tail_logs=[code])
    assert run_until_ended(None, "r1", spot=False) is end
    assert sky.calls == ["launch r1", "tail_logs r1 None"]


def run(name: str = "r1", *, is_managed: bool = False, status: str = "UP") -> LaunchedRun:
    return LaunchedRun(
        name=name, is_managed=is_managed, status=status, where="", resources="", launched_at=0
    )


def test_stop_takes_the_machine_down_only_after_the_uploads(fake: Callable[..., FakeSky]) -> None:
    sky = fake(tail_logs=[0])
    stop_run(run())
    assert sky.calls == ["exec r1", "tail_logs r1 7", "down r1"]
    sky = fake(tail_logs=[100])
    with pytest.raises(LaunchError, match="still saves or uploads"):
        stop_run(run(), timeout_seconds=5)
    assert "down r1" not in sky.calls
    sky = fake(tail_logs=[100])
    stop_run(run(), force=True)
    assert sky.calls[-1] == "down r1"
    sky = fake()
    stop_run(run(is_managed=True))
    assert sky.calls == ["jobs.cancel r1"]


def test_runs_lists_clusters_and_managed_jobs_newest_first(fake: Callable[..., FakeSky]) -> None:
    cluster = {
        "name": "fleet_tool_use_1",
        "status": SimpleNamespace(value="UP"),
        "cloud": "Lambda",
        "region": "r1",
        "resources_str": "1x H200",
        "launched_at": 10,
    }
    job = {
        "job_name": "fleet_both_2",
        "status": SimpleNamespace(value="RECOVERING"),
        "cloud": None,
        "region": None,
        "resources": "1x[H200:1][Spot]",
        "submitted_at": 20.0,
        "recovery_count": 3,
    }
    fake(status=[[cluster, {**cluster, "name": "somebody-elses"}]], jobs_queue=[([job], 1, {}, 1)])
    found = list_runs(lambda name: name.startswith("fleet_"))
    assert [entry.name for entry in found] == ["fleet_both_2", "fleet_tool_use_1"]
    assert (found[0].recoveries, found[1].where) == (3, "Lambda/r1")
    fake(status=[[cluster]], jobs_queue=[FakeSky.exceptions.ClusterNotUpError("no controller")])
    with pytest.raises(ConfigError, match=r"no run 'x'; the newest are: fleet_tool_use_1"):
        find_run("x")
