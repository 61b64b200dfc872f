"""SkyRL's evaluation dumps are written with its keys, and old ones are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.trajectories.making import attempt, call_turn, transcript

from skyfleet.trajectories.records import RecordError
from skyfleet.trajectories.skyrl_dump import dump_folder, read_dump, read_dump_file, write_dump
from skyfleet.trajectories.trajectory import Ending, Group, Trajectory

OLD = Path(__file__).parents[1] / "assets" / "dumped_evals" / "global_step_0_evals"


def shown(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def dumped(folder: Path, *attempts: Trajectory, env_key: str = "github") -> list[dict[str, Any]]:
    groups = [Group(task_key="t", env_key=env_key, trajectories=attempts)]
    write_dump(folder, groups, {"eval/all/avg_score": 0.5}, text=shown, env_class="w", max_turns=8)
    lines = (folder / f"{env_key.replace('/', '_')}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_row_has_skyrls_fields_and_its_reward_on_the_last_token(tmp_path: Path) -> None:
    (row,) = dumped(tmp_path, attempt(1.0, turns=(call_turn(),), transcripts=(transcript(3),)))
    assert row == {
        "input_prompt": "1 1",
        "output_response": "1 1 1",
        "score": [0.0, 0.0, 1.0],
        "stop_reason": "stop",
        "env_class": "w",
        "env_extras": {
            "task_key": "t",
            "data_source": "github",
            "max_turns": 8,
            "skyfleet": {"ending": "done", "success": True},
        },
        "data_source": "github",
    }
    assert (tmp_path / "aggregated_results.jsonl").read_text() == '{"eval/all/avg_score": 0.5}\n'


def test_a_transcript_that_starts_with_sampled_tokens_has_an_empty_prompt(tmp_path: Path) -> None:
    whole = transcript(2)
    sampled_text = replace(
        whole,
        token_ids=whole.token_ids[2:],
        loss_mask=whole.loss_mask[2:],
        logprobs=whole.logprobs[2:],
    )
    (row,) = dumped(tmp_path, attempt(0.5, turns=(call_turn(),), transcripts=(sampled_text,)))
    assert (row["input_prompt"], row["output_response"], row["score"]) == ("", "1 1", [0.0, 0.5])


def test_an_unknown_grade_has_no_score_and_comes_back_unknown(tmp_path: Path) -> None:
    unknown = attempt(None, turns=(call_turn(),), transcripts=(transcript(1),))
    unplayed = attempt(0.0, transcripts=(transcript(0),), ending=Ending.CONTEXT_FULL)
    rows = dumped(tmp_path, unknown, unplayed)
    assert [row["score"] for row in rows] == [[], 0.0]
    assert [t.reward for t in read_dump_file(tmp_path / "github.jsonl")] == [None, 0.0]


def test_an_episode_without_tokens_is_not_dumped(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"t has no tokens.*dump_eval_results=false"):
        dumped(tmp_path, attempt(1.0, turns=(call_turn(),)))


def test_a_source_with_a_slash_and_a_set_of_its_own_have_a_place(tmp_path: Path) -> None:
    dumped(tmp_path, attempt(0.0), env_key="a/b")
    assert (tmp_path / "a_b.jsonl").exists()
    assert dump_folder(Path("x"), 5) == Path("x/dumped_evals/global_step_5_evals")
    assert dump_folder(Path("x"), 5, "far") == Path("x/dumped_evals/global_step_5_evals/far")


def test_an_old_dump_is_split_into_messages_calls_and_results() -> None:
    won, lost, cut, failed = read_dump_file(OLD / "github.jsonl")
    assert [m.role for m in won.prompt] == ["system", "user"]
    assert won.prompt[1].text == "Close issue 7."
    first, last = won.turns
    assert (first.action.tool_calls[0].name, first.action.tool_calls[0].arguments) == (
        "close_issue",
        {"number": 7},
    )
    # A `"name":` in a result is no call, which counting the text would have made of it.
    assert [len(turn.action.tool_calls) for turn in won.turns] == [1, 0]
    assert (first.replies[0].role, first.replies[0].text) == ("tool", '{"name": "closed"}')
    assert last.action.text == "The issue is closed. <done>"
    assert [reply.is_error for turn in lost.turns for reply in turn.replies] == [True, False]
    assert [reply.text for reply in cut.turns[0].replies] == ["1", "2"]
    assert cut.turns[0].action.reasoning == "Which one?"
    assert len(cut.turns) == 2
    assert [t.ending for t in (won, lost, cut, failed)] == [
        Ending.DONE,
        Ending.DONE,
        Ending.CONTEXT_FULL,
        Ending.FAILED,
    ]


def test_the_scores_of_an_old_dump_are_summed_and_a_failed_environment_is_no_zero() -> None:
    groups = read_dump(OLD)
    assert [(g.task_key, g.env_key, g.rewards) for g in groups] == [
        ("task-a", "github", [1.0, 0.0]),
        ("task-b", "github", [0.0]),
    ]
    assert [t.sample for t in groups[0].trajectories] == [0, 1]


def test_rows_without_a_task_key_are_identified_by_their_prompt(tmp_path: Path) -> None:
    row = {"output_response": "hi", "score": [0.0], "stop_reason": "stop"}
    lines = [json.dumps({**row, "input_prompt": prompt}) for prompt in ("one", "two", "one")]
    (tmp_path / "gym.jsonl").write_text("\n".join(lines))
    first, second, third = read_dump_file(tmp_path / "gym.jsonl")
    assert (first.task_key, first.env_key, third.sample) == (third.task_key, "gym", 1)
    assert first.task_key != second.task_key
    assert [m.text for m in first.prompt] == ["one"]


@pytest.mark.parametrize("line", ["{", "[]", '{"input_prompt": "a"}', '{"input_prompt": 3}'])
def test_a_line_that_is_no_dump_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text(f"{line}\n")
    with pytest.raises(RecordError, match=r"a\.jsonl line 1: .*SkyRL"):
        read_dump_file(tmp_path / "a.jsonl")


def test_a_folder_without_a_dump_says_what_one_looks_like(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="dumped_evals/global_step_0_evals"):
        read_dump(tmp_path)


def test_what_is_written_is_read_again_with_its_endings_and_grades(tmp_path: Path) -> None:
    bare = [
        *(attempt(reward, ending=ending) for ending in Ending for reward in (1.0, 0.0, None)),
        attempt(0.7, success=True),
        attempt(1.0, success=False),
    ]
    attempts = [replace(a, turns=(call_turn(),), transcripts=(transcript(3),)) for a in bare]
    dumped(tmp_path, *attempts)
    again = read_dump_file(tmp_path / "github.jsonl")
    assert [(t.ending, t.reward, t.success) for t in again] == [
        (t.ending, t.reward, t.success) for t in attempts
    ]


def test_in_a_dump_of_skyrls_a_zero_without_a_verdict_is_unknown_and_a_score_is_not(
    tmp_path: Path,
) -> None:
    row = {"input_prompt": "a", "output_response": "b", "stop_reason": "timeout"}
    lines = [json.dumps({**row, "score": score}) for score in ([0.0, 0.0], 0.0, [0.0, 1.0], 0.5)]
    (tmp_path / "gym.jsonl").write_text("\n".join([*lines, "", "  "]) + "\n")
    read = read_dump_file(tmp_path / "gym.jsonl")
    assert [(t.reward, t.success) for t in read] == [
        (None, None),
        (None, None),
        (1.0, True),
        (0.5, False),
    ]
