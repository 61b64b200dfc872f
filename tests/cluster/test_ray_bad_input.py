"""A cluster that cannot be used is one sentence before anything starts; needs no cluster."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from tests.fakes.small_runs import small_config

from skyfleet.cluster.placement import plan_placement
from skyfleet.cluster.ray_session import check_versions, open_ray, require_ray
from skyfleet.errors import ClusterError, ConfigError, MissingExtraError
from skyfleet.trainer.training_run import run_training

RAY = "trainer.placement.use_ray=true"


def test_without_ray_its_extra_is_named() -> None:
    with (
        patch("skyfleet.cluster.ray_session.find_spec", return_value=None),
        pytest.raises(MissingExtraError, match=r"ray is not installed; .* the extra ray"),
    ):
        require_ray()


def test_a_node_with_another_version_is_named() -> None:
    own = ("1.0", "3.11.7")
    check_versions({"10.0.0.1": ("1.0", "3.11.9")}, own)
    with pytest.raises(
        ClusterError, match=r"node 10\.0\.0\.2 has skyfleet 0\.9 on Python 3\.11\.7"
    ):
        check_versions({"10.0.0.1": own, "10.0.0.2": ("0.9", "3.11.7")}, own)
    with pytest.raises(ClusterError, match=r"node a has skyfleet 1\.0 on Python 3\.12\.1"):
        check_versions({"a": ("1.0", "3.12.1")}, own)
    with pytest.raises(ClusterError, match=r"node a cannot run skyfleet: No module .*; install"):
        check_versions({"a": "No module named 'skyfleet'"}, own)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("ray://head:10001", r"submit the command with `ray job submit"),
        ("nowhere", r"RAY_ADDRESS='nowhere' cannot be reached"),
    ],
)
async def test_a_wrong_address_is_one_sentence(
    address: str, sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    placement = plan_placement(small_config(tmp_path, RAY), uses_gpus=False)
    with pytest.raises(ClusterError, match=sentence):
        async with open_ray(placement, ready_timeout_seconds=1):
            raise AssertionError


async def test_an_address_where_nothing_listens_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{bound.getsockname()[1]}")
        placement = plan_placement(small_config(tmp_path, RAY), uses_gpus=False)
        with pytest.raises(ClusterError, match="start the cluster with `ray start --head`"):
            async with open_ray(placement, ready_timeout_seconds=1):
                raise AssertionError


async def test_a_placement_that_does_not_exist_leaves_no_run_folder(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", RAY, "trainer.placement.policy_num_gpus_per_node=3")
    with pytest.raises(ConfigError, match=r"are 3 learner ranks with trainer\.strategy=single"):
        await run_training(config)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_nothing_that_a_run_in_one_process_imports_imports_ray() -> None:
    code = """
import sys
import skyfleet.trainer.assemble, skyfleet.cluster.ray_engines, skyfleet.cluster.ray_workers
assert "ray" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
