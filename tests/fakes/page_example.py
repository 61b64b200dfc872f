"""What a page of docs/ shows, as what it is: a module and a task."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from skyfleet.tasks.task import Task

DOCS = Path(__file__).parents[2] / "docs"


def block_on(page: str, language: str) -> str:
    """The page's one block in `language`."""
    _, block = (DOCS / page).read_text().split(f"```{language}\n")
    return block.partition("```")[0]


def module_on(page: str) -> ModuleType:
    module = ModuleType(page.removesuffix(".md"))
    exec(compile(block_on(page, "python"), str(DOCS / page), "exec"), vars(module))
    return module


def task_on(page: str) -> Task:
    return Task.model_validate_json(block_on(page, "json"))
