"""`skyfleet evaluate` against a failing server: no score, one sentence, an exit status."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engines.broken_server_runs import KINDS
from tests.fakes.broken_http import broken_http_thread
from tests.fakes.small_runs import SETTINGS
from tests.fakes.tiny_policy import DIMENSIONS
from typer.testing import CliRunner

from skyfleet.cli.main import app
from skyfleet.errors import NothingGradedError
from skyfleet.models.loading import LoadedModel, save_model
from skyfleet.models.tiny import build_tiny, train_tokenizer
from skyfleet.trajectories.archive import eval_path, read_trajectories


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer([], vocab_size=300)
    module = build_tiny(tokenizer, DIMENSIONS | {"max_position_embeddings": 16_012}, seed=0)
    save_model(LoadedModel(module=module, tokenizer=tokenizer), folder)
    return folder


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("status 500", "failed with 500: overloaded"),
        ("truncated body", "RemoteProtocolError"),
        ("hangs before the headers", "did not answer"),
        ("drips the body", "did not answer"),
        ("an endless body", "sent more than"),
        ("token ids as strings", "not an integer"),
    ],
)
def test_a_set_that_no_server_answered_has_no_score(
    model: Path, tmp_path: Path, name: str, sentence: str
) -> None:
    (tmp_path / "run.yaml").write_text(SETTINGS)
    output = tmp_path / "kept"
    with broken_http_thread(KINDS[name].behave) as url:
        keys = (
            "generator.backend=openai",
            f"generator.remote_inference_engine_urls=[{url}]",
            f"trainer.policy.model.path={model}",
            "trainer.policy.model_config_kwargs={}",
            "generator.max_input_length=16000",
            "generator.trajectory_timeout_seconds=0.6",
        )
        args = ["evaluate", str(tmp_path / "run.yaml"), *keys, "--eval-set", "unseen"]
        result = CliRunner().invoke(app, [*args, "--output", str(output)])
    assert result.exit_code == 1
    assert isinstance(result.exception, NothingGradedError)
    assert "evaluation set unseen: no attempt could be graded" in str(result.exception)
    assert sentence in str(result.exception)
    assert "unseen: 3 of 3 attempts have no grade" in result.output
    assert "0.0 %, " not in result.output
    kept = list(read_trajectories(eval_path(output / "trajectories", "unseen", 0)))
    assert [t.grade for t in kept] == [None] * 3
