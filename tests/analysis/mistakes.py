"""Building blocks of scripted mistakes for the labelled set.

A mistake changes the reference solution of a task. The label follows from the change and from
whether the environment rejected it, never from the error text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.analysis.error_messages import ASIDES, CANNOT, CLAIMS
from tests.analysis.scripted import Script

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.tool_calls.hermes import parse_hermes
from skyfleet.curation.replay import mutate_value
from skyfleet.envs.env import DONE
from skyfleet.envs.tool_turns import SUBMIT, SUBMIT_NAME
from skyfleet.tasks.task import RecordedCall, Task
from skyfleet.worlds.catalog import get_world

NAMED = re.compile(r"(.*_id|number|repo|subreddit|city|venue|area|project|place|file|folder)")
"""Arguments that name an object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A task, and the random numbers that decide how the agent fails it."""

    task: Task
    rng: Random
    held_out: bool

    @property
    def calls(self) -> list[RecordedCall]:
        return list(self.task.solution)

    @property
    def tools(self) -> dict[str, ToolSpec]:
        specs = (*get_world(self.task.env_key).toolkit.specs, SUBMIT)
        return {spec.name: spec for spec in specs}

    @property
    def writing(self) -> frozenset[str]:
        return get_world(self.task.env_key).toolkit.writing | {SUBMIT_NAME}

    def pick(self, lists: tuple[Sequence[str], Sequence[str]]) -> str:
        return self.rng.choice(lists[self.held_out])

    def act(self, call: RecordedCall) -> Message:
        tool_call = ToolCall(id="call_0", name=call.name, arguments=call.arguments)
        return Message(role="assistant", content=self.pick(ASIDES), tool_calls=(tool_call,))

    def stop(self) -> Message:
        return Message(role="assistant", content=f"{self.pick(CLAIMS)} {DONE}".strip())

    def stop_in_words(self) -> Message:
        claim = next(filter(None, iter(lambda: self.pick(CLAIMS), None)))
        return Message(role="assistant", content=f"{claim} {DONE}")

    def refuse(self) -> Message:
        return Message(role="assistant", content=f"{self.pick(CANNOT)} {DONE}")

    def look(self, call: RecordedCall | None = None) -> Message:
        """A read-only call that succeeds."""
        reading = [spec for name, spec in self.tools.items() if name not in self.writing]
        free = [spec for spec in reading if not spec.parameters["required"]]
        calls = [one for one in self.calls if one.name not in self.writing]
        options = [*calls, *(RecordedCall(name=spec.name, arguments={}) for spec in free)]
        return self.act(call or self.rng.choice(options)) if options else self.act(self.calls[0])

    def before(self, place: int) -> list[Message]:
        """The reference solution up to a call, sometimes after an error that it resolves."""
        proper = [self.act(call) for call in self.calls[:place]]
        if not proper or self.rng.random() < 0.6:
            return proper
        return [self.rng.choice([self.slip_of_id, self.slip_of_form, self.slip_of_name])(), *proper]

    def slip_of_id(self) -> Message:
        return self.act(absent(self, self.calls[0]) or unreal(self, self.calls[0]))

    def slip_of_form(self) -> Message:
        return broken(self, self.calls[0])

    def slip_of_name(self) -> Message:
        return self.act(unreal(self, self.calls[0]))

    def last_write(self) -> int:
        places = [n for n, call in enumerate(self.calls) if call.name in self.writing]
        return places[-1]


Write = Callable[[Scene], Script | None]
"""None if the mistake is not possible in this task."""


def changed(call: RecordedCall, **arguments: Any) -> RecordedCall:
    return RecordedCall(name=call.name, arguments={**call.arguments, **arguments})


def absent(scene: Scene, call: RecordedCall) -> RecordedCall | None:
    """The call with the name of an object that does not exist."""
    for name, value in call.arguments.items():
        if NAMED.fullmatch(name) is None:
            continue
        other: object = 900_000 + scene.rng.randrange(99_999)
        if isinstance(value, str):
            other = scene.rng.choice(["Zorqua", "Quimbel", "Vexatia", "Brundlow"])
        return changed(call, **{name: other})
    return None


def unreal(scene: Scene, call: RecordedCall) -> RecordedCall:
    """A call of a tool that does not exist."""
    verb, _, thing = call.name.partition("_")
    names = [f"{verb}{thing.title()}", f"{thing or verb}_tool", f"api.{call.name}", f"do_{thing}"]
    return RecordedCall(name=scene.rng.choice(names), arguments=call.arguments)


def other(scene: Scene, call: RecordedCall) -> RecordedCall | None:
    """The call with a different valid value."""
    schemas = scene.tools[call.name].parameters["properties"]
    items = list(call.arguments.items())
    scene.rng.shuffle(items)
    for name, value in items:
        wrong = mutate_value(value, schemas.get(name, {}))
        if wrong is not None:
            return changed(call, **{name: wrong})
    return None


def unfit(scene: Scene, call: RecordedCall) -> RecordedCall | None:
    """The call with arguments that violate its schema."""
    schema = scene.tools[call.name].parameters
    options = [changed(call, **{scene.rng.choice(["when", "note", "target", "priority"]): "x"})]
    for name, value in call.arguments.items():
        part = schema["properties"].get(name, {})
        if name in schema["required"]:
            left = {key: kept for key, kept in call.arguments.items() if key != name}
            options.append(RecordedCall(name=call.name, arguments=left))
        if part.get("enum"):
            options.append(changed(call, **{name: scene.rng.choice(["soon", "any", "none"])}))
        elif part.get("type") == "integer":
            options.append(changed(call, **{name: f"#{value}"}))
        else:
            options.append(changed(call, **{name: [value]}))
    return scene.rng.choice(options)


def broken(scene: Scene, call: RecordedCall) -> Message:
    """The call as text that does not parse."""
    text = json.dumps({"name": call.name, "arguments": dict(call.arguments)})
    pieces = [f"{name}={value!r}" for name, value in call.arguments.items()]
    options = [
        f"<tool_call>\n{text.replace(': {', ': {{')}\n</tool_call>",
        f"<tool_call>\n{text[: -len(text) // 3]}",
        f"<tool_call>\n{text.replace(chr(34), chr(39))}\n</tool_call>",
        f"<tool_call>\n{call.name}({', '.join(pieces)})\n</tool_call>",
        f"```json\n{text}\n```",
        f"{text}\n</tool_call>",
    ]
    message = parse_hermes(scene.rng.choice(options)).message
    return message if not message.tool_calls else broken(scene, call)
