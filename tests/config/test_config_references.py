"""`${...}` takes the value of another key or of an environment variable."""

from __future__ import annotations

import pytest

from skyfleet.config.loading import load_config
from skyfleet.errors import ConfigError


def test_a_whole_reference_keeps_its_type_and_an_embedded_one_becomes_text() -> None:
    config = load_config(
        "trainer: {policy_mini_batch_size: '${trainer.train_batch_size}', train_batch_size: 8}",
        ["trainer.run_name=s${trainer.seed}_${trainer.epochs}"],
    )
    assert config.trainer.policy_mini_batch_size == 8
    assert config.trainer.run_name == "s42_20"


def test_a_reference_may_name_a_default_a_section_or_the_other_spelling() -> None:
    config = load_config(
        "generator: {eval_sampling_params: '${generator.sampling_params}'}",
        [
            "generator.sampling_params.top_p=0.5",
            "trainer.seed=${generator.inference_engine.num_engines}",
        ],
    )
    assert config.generator.eval_sampling_params == config.generator.sampling_params
    assert config.trainer.seed == 1


def test_the_environment_is_read_with_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME_OF_DATA", "/data")
    monkeypatch.setenv("CIRCULAR", "${oc.env:CIRCULAR}")
    monkeypatch.delenv("ABSENT", raising=False)
    config = load_config(
        "data: {train_data: ['${oc.env:HOME_OF_DATA}/train.parquet']}",
        [
            "trainer.seed=${oc.env:ABSENT,7}",
            "trainer.epochs=${oc.env:ABSENT,${trainer.seed}}",
            "trainer.max_training_steps=${oc.env:ABSENT,null}",
            "trainer.project_name=${oc.env:CIRCULAR}",
        ],
    )
    assert config.data.train_data == ["/data/train.parquet"]
    assert (config.trainer.seed, config.trainer.epochs) == (7, 7)
    assert config.trainer.max_training_steps is None
    assert config.trainer.project_name == "${oc.env:CIRCULAR}"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            [
                "trainer.run_name=${trainer.project_name}",
                "trainer.project_name=${trainer.run_name}",
            ],
            "trainer.project_name -> trainer.run_name -> trainer.project_name "
            "is a cycle of references; give one of them a value",
        ),
        (
            ["trainer.run_name=fleet_${MODALITY}"],
            "trainer.run_name refers to ${MODALITY}, which is not a key; write a dotted key, "
            "or ${oc.env:MODALITY} for an environment variable",
        ),
        (
            ["trainer.run_name=${oc.env:ABSENT_NAME}"],
            "trainer.run_name refers to ${oc.env:ABSENT_NAME}, which is not set; "
            "set it or write ${oc.env:ABSENT_NAME,default}",
        ),
    ],
)
def test_a_bad_reference_is_one_sentence_however_many_keys_follow_it(
    overrides: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("", overrides)
    assert str(caught.value) == sentence
