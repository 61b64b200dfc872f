"""Turn the results of Fleet's tools into messages to the agent, whichever client called them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from skyfleet.chat.message import Image, Message, Part, Text, ToolCall
from skyfleet.envs.env import Step
from skyfleet.envs.tool_turns import SUBMIT_NAME


def make_reply(call: ToolCall, content: str | tuple[Part, ...]) -> Step:
    """Show a result. Some tools report an error in it instead of marking it as one."""
    if isinstance(content, str) and (problem := _find_problem(content)) is not None:
        if problem:
            return make_error(call, problem)
        reply = Message(role="tool", content=content, tool_call_id=call.id, is_error=True)
    else:
        reply = Message(role="tool", content=content or "ok", tool_call_id=call.id)
    return Step(messages=(reply,))


def make_error(call: ToolCall, problem: str) -> Step:
    reply = Message(role="tool", content=f"Error: {problem}", tool_call_id=call.id, is_error=True)
    return Step(messages=(reply,))


def reject_unknown(call: ToolCall, names: Iterable[str]) -> Step:
    return make_error(call, f"no tool {call.name!r:.60}; tools: {', '.join(names)}")


def reject_answer(call: ToolCall) -> Step:
    return make_error(call, f"{SUBMIT_NAME} takes answer, a text")


def confirm_answer(call: ToolCall) -> Step:
    """End the episode; the agent sees its answer as the last message."""
    answer = str(call.arguments["answer"])
    reply = Message(role="tool", content=answer or '""', tool_call_id=call.id)
    return Step(messages=(reply,), done=True)


def read_image_url(url: str) -> dict[str, Any]:
    """Return the MCP block of an image in a data URL."""
    head, _, data = url.rpartition(",")
    media_type = head.removeprefix("data:").partition(";")[0] or "image/png"
    return {"type": "image", "data": data, "mimeType": media_type}


def add_screenshot(prompt: Message, content: str | tuple[Part, ...]) -> Message:
    """Show the screen below the task; a result without an image is left out."""
    images = [part for part in content if isinstance(part, Image)]
    return replace(prompt, content=(Text(prompt.text), *images)) if images else prompt


def _find_problem(content: str) -> str | None:
    """Return the error that a JSON object consists of, "" if it has more to say, None if there is
    none. The signs are those of FleetTaskEnv."""
    if not content.startswith("{"):
        return None
    try:
        result: dict[str, Any] = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not (result.get("error") or result.get("status") == "failed" or result.get("isError")):
        return None
    return result["error"] if [*result] == ["error"] and isinstance(result["error"], str) else ""
