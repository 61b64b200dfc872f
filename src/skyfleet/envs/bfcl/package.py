"""Import bfcl-eval's data and checkers without the clients of its models.

The checkers look a model's name up in a table of 200 handlers, which import the clients of a dozen
vendors. In its place they get a table with one name.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

from skyfleet.errors import ConfigError, MissingExtraError

MODEL = "skyfleet"
_TABLE = "bfcl_eval.constants.model_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bfcl:
    """What the adapter calls of bfcl-eval."""

    utils: Any
    categories: Any
    languages: Any
    check_calls: Any
    """Of a single turn: `ast_checker`."""
    check_turns: Any
    """Of several turns: `multi_turn_checker`."""
    turns: Any
    """The module that executes calls, and holds every instance that calls were executed on."""
    json_types: Mapping[str, str]
    max_steps: int
    """Messages with calls per turn; with more an attempt has failed."""
    more_functions_prompt: str
    """What the user says when a missing function is added."""


@cache
def load_bfcl() -> Bfcl:
    try:
        with _project_folder(), _without_clients():
            prompts = import_module("bfcl_eval.constants.default_prompts")
            evaluation = "bfcl_eval.eval_checker"
            return Bfcl(
                utils=import_module("bfcl_eval.utils"),
                categories=import_module("bfcl_eval.constants.category_mapping"),
                languages=import_module("bfcl_eval.constants.enums").Language,
                check_calls=import_module(f"{evaluation}.ast_eval.ast_checker").ast_checker,
                check_turns=import_module(
                    f"{evaluation}.multi_turn_eval.multi_turn_checker"
                ).multi_turn_checker,
                turns=import_module(f"{evaluation}.multi_turn_eval.multi_turn_utils"),
                json_types=import_module("bfcl_eval.constants.type_mappings").GORILLA_TO_OPENAPI,
                max_steps=prompts.MAXIMUM_STEP_LIMIT,
                more_functions_prompt=prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC,
            )
    except ImportError as error:
        raise MissingExtraError("bfcl-eval", "bfcl") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A test case, with its functions as a model sees them and as the checker does."""

    shown: Mapping[str, Any]
    checked: Mapping[str, Any]
    answer: Sequence[Any] | None
    """None in categories that only ask whether a call is made."""


@cache
def load_category(category: str) -> Mapping[str, Entry]:
    """Return the test cases of a category by id."""
    bfcl = load_bfcl()
    if category not in list_categories():
        raise ConfigError(
            f"bfcl has no category {category!r} that runs here; choose from "
            f"{', '.join(list_categories())}"
        )
    shown = bfcl.utils.load_dataset_entry(category)
    checked = bfcl.utils.load_dataset_entry(category, include_language_specific_hint=False)
    answers = {}
    if "relevance" not in category:
        answers = {
            entry["id"]: entry["ground_truth"]
            for entry in bfcl.utils.load_ground_truth_entry(category)
        }
    return {
        one["id"]: Entry(shown=one, checked=other, answer=answers.get(one["id"]))
        for one, other in zip(shown, checked, strict=True)
    }


def list_categories() -> tuple[str, ...]:
    """Without memory and web search, which need embeddings and a search engine."""
    categories = load_bfcl().categories
    return (*categories.SINGLE_TURN_CATEGORY, *categories.MULTI_TURN_CATEGORY)


@contextmanager
def _project_folder() -> Iterator[None]:
    """The import creates folders for results, by default among the installed packages."""
    if "BFCL_PROJECT_ROOT" in os.environ:
        yield
        return
    os.environ["BFCL_PROJECT_ROOT"] = _make_folder().name
    try:
        yield
    finally:
        del os.environ["BFCL_PROJECT_ROOT"]


@cache
def _make_folder() -> tempfile.TemporaryDirectory[str]:
    """Kept until the process ends."""
    return tempfile.TemporaryDirectory(prefix="skyfleet-bfcl-")


@contextmanager
def _without_clients() -> Iterator[None]:
    if _TABLE in sys.modules:
        yield
        return
    table = ModuleType(_TABLE)
    vars(table)["MODEL_CONFIG_MAPPING"] = {MODEL: SimpleNamespace(underscore_to_dot=True)}
    sys.modules[_TABLE] = table
    try:
        yield
    finally:
        del sys.modules[_TABLE]
