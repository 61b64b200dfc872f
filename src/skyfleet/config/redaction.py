"""The configuration as it is stored and shown: secrets are references or hashes.

A secret that came from `${oc.env:NAME}` is written as that reference, so that the stored file loads
again; any other becomes `<redacted sha256:1a2b3c4d>` and must be given again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, SecretStr

from skyfleet.config.parsing import leaves
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.redaction import (
    MARK,
    OLD_MARK,
    Mask,
    hash_secret,
    redact_value,
    remember_environment,
    remember_secrets,
    split_secret_url,
)
from skyfleet.secret_names import looks_secret
from skyfleet.terminal import install_log_filter

_VARIABLE = re.compile(r"\$\{oc\.env:\s*(\w+)")
_REFERENCE = re.compile(r"\$\{oc\.env:[^{}]*\}")
_LEADING_SCHEME = re.compile(r"(?i)^(?:bearer|basic|token)\s+")
_SCHEME = re.compile(r"(?i)\b(?:bearer|basic|token)\b|\s")


def redact_config(config: RunConfig) -> dict[str, Any]:
    """Plain values for YAML, trackers and reports, without a secret."""

    def mask(secret: str) -> str:
        return _refer_or_hash(secret, config.variables)

    return _redact_tree(config, mask)


def find_redacted(values: Mapping[tuple[str, ...], Any]) -> Iterator[str]:
    """One sentence per key whose stored value lacks its secret."""
    for path, value in values.items():
        key = ".".join(path)
        if any(MARK.search(text) or text == OLD_MARK for text in _texts(value)):
            yield (
                f"{key} holds a redacted secret; give it again as {key}=..., or as "
                f"{key}='${{oc.env:NAME}}' with the environment variable NAME"
            )


def reject_missing_secrets(name: str, section: BaseModel) -> None:
    """ConfigError for a section of a stored configuration whose secrets are not there."""
    for path, value in leaves(section.model_dump(), (name,)):
        for problem in find_redacted({path: value}):
            raise ConfigError(problem)
        for text in _texts(value):
            if found := _VARIABLE.search(text):
                raise ConfigError(
                    f"{'.'.join(path)} refers to ${{oc.env:{found[1]}}}, which is not set; set the "
                    f"environment variable {found[1]}"
                )


def find_variables(values: Iterable[Any]) -> dict[str, str]:
    """The environment variables that these values refer to and that are set."""
    names = {name for value in values for text in _texts(value) for name in _VARIABLE.findall(text)}
    return {name: os.environ[name] for name in sorted(names) if os.environ.get(name)}


def differs_in_secrets_only(key: str, one: Any, other: Any) -> bool:
    """Whether two redacted values of a key are equal apart from a changed or moved secret."""
    if key in _list_masked_mappings() and _has_changed_setting(one, other):
        return False
    return bool(one != other and _blank(one) == _blank(other))


def _has_changed_setting(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two masked mappings have other hashes under a name that is not a secret's."""
    pairs = ((name, one[name], other[name]) for name in one.keys() & other.keys())
    return any(
        before != now and bool(MARK.fullmatch(before) and MARK.fullmatch(now))
        for name, before, now in pairs
        if not looks_secret(name)
    )


@cache
def _list_masked_mappings() -> frozenset[str]:
    """The keys of which every value is masked, such as the environment variables of a server."""

    def search(section: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            kind = field.annotation
            if kind == dict[str, SecretStr]:
                yield prefix + name
            elif isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from search(kind, f"{prefix}{name}.")

    return frozenset(search(RunConfig, ""))


def remember_config_secrets(config: RunConfig) -> None:
    """Redact the secrets of this configuration in every later text of this process."""
    found: list[str] = []

    def collect(secret: str) -> str:
        if not _REFERENCE.search(secret):
            found.extend(split_secret_url(_LEADING_SCHEME.sub("", secret)))
        return hash_secret(secret)

    _redact_tree(config, collect)
    remember_secrets(found)
    remember_environment(os.environ)
    install_log_filter()


def _refer_or_hash(secret: str, variables: Mapping[str, str]) -> str:
    text = secret
    for name, value in sorted(variables.items(), key=lambda item: -len(item[1])):
        text = text.replace(value, f"${{oc.env:{name}}}")
    rest = _SCHEME.sub("", _REFERENCE.sub("", MARK.sub("", text)))
    return hash_secret(secret) if rest else text


def _redact_tree(config: RunConfig, mask: Mask) -> dict[str, Any]:
    tree = _mask_secret_fields(config.model_dump(mode="json"), config.model_dump(), mask)
    redacted: dict[str, Any] = redact_value(tree, mask)
    return redacted


def _mask_secret_fields(shown: Any, plain: Any, mask: Mask) -> Any:
    """`shown` with the fields of type SecretStr masked by `mask` instead of by pydantic."""
    if isinstance(plain, SecretStr):
        return mask(plain.get_secret_value()) if plain.get_secret_value() else ""
    if isinstance(plain, dict):
        return {name: _mask_secret_fields(shown[name], plain[name], mask) for name in shown}
    return shown


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _blank(value: Any) -> Any:
    """The value with every reference and hash replaced by one mark."""
    if isinstance(value, str):
        blank = _REFERENCE.sub(OLD_MARK, MARK.sub(OLD_MARK, value))
        return OLD_MARK if blank.endswith(OLD_MARK) and not _SCHEME.sub("", blank[:-10]) else blank
    if isinstance(value, Mapping):
        return {name: _blank(item) for name, item in value.items()}
    return [_blank(item) for item in value] if isinstance(value, (list, tuple)) else value
