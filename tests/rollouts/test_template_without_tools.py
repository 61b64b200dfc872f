"""A chat template that cannot show tools serves environments without tools in one transcript."""

from __future__ import annotations

from tests.chat.small_tokenizer import small_tokenizer
from tests.fakes.counter_env import TASK, make_factory
from tests.rollouts.test_cut_turns import LIMITS, PatientEnv, TokenLines, policy_of, written

from skyfleet.chat.renderers import make_renderer
from skyfleet.rollouts.conversation import REWRITTEN
from skyfleet.rollouts.episode import run_episode

SHOWS_NO_TOOLS = (
    "{%- for m in messages %}{{- '[' + m.role + '] ' + m.content + ' <|endoftext|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '[assistant]' }}{% endif %}"
)
FORGETS_ANSWERS = SHOWS_NO_TOOLS.replace(
    "m.content", "(m.content if m.role != 'assistant' or loop.last else '')"
)


async def test_turns_of_an_environment_without_tools_are_one_transcript() -> None:
    renderer = make_renderer(small_tokenizer(SHOWS_NO_TOOLS))
    lines = [written(renderer, text) for text in ("a heron", "a bird", "the end")]
    engine = TokenLines(*[(line, "stop") for line in lines])
    env = PatientEnv()
    trajectory = await run_episode(TASK, make_factory(env), policy_of(engine, renderer), LIMITS)
    assert [action.text for action in env.actions] == ["a heron", "a bird", "the end"]
    (transcript,) = trajectory.transcripts
    assert transcript.token_ids == [*engine.prompts[-1], *lines[-1]]
    assert sum(transcript.loss_mask) == sum(map(len, lines))


async def test_a_template_that_rewrites_earlier_turns_still_starts_new_transcripts() -> None:
    renderer = make_renderer(small_tokenizer(FORGETS_ANSWERS))
    lines = [written(renderer, text) for text in ("a heron", "the end")]
    engine = TokenLines(*[(line, "stop") for line in lines])
    trajectory = await run_episode(
        TASK, make_factory(PatientEnv()), policy_of(engine, renderer), LIMITS
    )
    assert [transcript.reason for transcript in trajectory.transcripts] == ["", REWRITTEN]
