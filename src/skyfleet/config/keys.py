"""Keys: every dotted key of RunConfig with its type, bounds, default and meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from operator import getitem
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo

from skyfleet.config.references import resolve
from skyfleet.config.root import RunConfig

# SkyRL's rules for what a key takes when nobody sets it.
DERIVED: dict[str, str] = {
    "trainer.ref.model.path": "${trainer.policy.model.path}",
    "trainer.algorithm.temperature": "${generator.sampling_params.temperature}",
    "trainer.critic_mini_batch_size": "${trainer.policy_mini_batch_size}",
    "generator.max_input_length": "${trainer.max_prompt_length}",
    "generator.eval_sampling_params.max_generate_length": (
        "${generator.sampling_params.max_generate_length}"
    ),
    "trainer.run_path": "runs/${trainer.run_name}",
    "trainer.ckpt_path": "${trainer.run_path}/checkpoints",
    "trainer.export_path": "${trainer.run_path}/exports",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    name: str
    type: str
    bounds: str
    default: Any
    """As one would write it: a reference where the key follows another."""
    meaning: str
    free: bool
    """Holds a mapping whose own keys are not ours to check."""


@cache
def known_keys() -> Mapping[str, Key]:
    return {key.name: key for key in _keys(RunConfig, RunConfig(), "")}


@cache
def known_sections() -> frozenset[str]:
    names = (name.split(".") for name in known_keys())
    return frozenset(".".join(name[:end]) for name in names for end in range(1, len(name)))


def value_at(tree: Mapping[str, Any], key: str) -> Any:
    return reduce(getitem, key.split("."), tree)


def default_at(tree: Mapping[str, Any], key: str) -> Any:
    """What the key would hold in this tree if nobody had set it."""
    return resolve(tree, known_keys()[key].default, (key,))


def _keys(section: type[BaseModel], defaults: BaseModel | None, prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        default = field.default if defaults is None else getattr(defaults, name)
        child = _section_of(field.annotation)
        if child is None:
            yield _key(prefix + name, field, default)
        else:
            yield from _keys(child, default, f"{prefix}{name}.")


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for kind in get_args(annotation) or (annotation,):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _key(name: str, field: FieldInfo, default: Any) -> Key:
    type_ = _type_name(field.annotation)
    return Key(
        name=name,
        type=type_,
        bounds=", ".join(filter(None, map(_bound, field.metadata))),
        default=DERIVED.get(name, default),
        meaning=field.description or "",
        free="dict" in type_,
    )


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, UnionType):
        return " | ".join(map(_type_name, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type_name, arguments))}]"
    if annotation is NoneType:
        return "null"
    return "any" if annotation is Any else str(annotation.__name__)


def _bound(rule: Any) -> str:
    match rule:
        case Ge(ge=bound):
            return f"at least {bound}"
        case Gt(gt=bound):
            return f"above {bound}"
        case Le(le=bound):
            return f"at most {bound}"
        case Lt(lt=bound):
            return f"below {bound}"
        case MinLen():
            return "not empty"
        case AfterValidator(func=func):
            return func.__doc__ or ""
    return ""
