"""Settings as a JSON file, which holds what was set and leaves the rest at its defaults.

JSON, because some settings may be ``null``, which TOML can't say, and because YAML would bring types of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from cachecraft_rag.store_config import Settings

S = TypeVar("S", bound=Settings)

_LONGEST_VALUE = 80  # characters of a refused value that a message shows


def read_settings(kind: type[S], path: str | Path) -> S:
    """Settings from a file.

    Args:
        kind: Which settings.
        path: The file: a JSON object whose names are those of the settings.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no JSON object, or settings are not allowed: each is named with its value and what is.
    """
    path = Path(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once, parse_constant=_no_number)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: this is no JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f'{path}: {_shown(values)} is no JSON object; give {{"setting": value, ...}}')
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = [_problem(kind, details) for details in error.errors()]
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems)) from None  # it would say all again


def write_settings(settings: Settings, path: str | Path) -> None:
    """Write what was set of some settings; folders are made, and an existing file is replaced.

    Raises:
        ValueError: A setting holds bytes: a key itself, which belongs in no readable file.
    """
    values = settings.model_dump(exclude_unset=True)
    if name := _name_of_bytes(values):
        raise ValueError(f"{name}: raw bytes are not written to a file; give the path of a key file, or env:NAME")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's values; of a name that is there twice, one would be lost without a word."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)}: is there twice; give it once")
    return values


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON number; give a finite one")


def _problem(kind: type[BaseModel], details: Mapping[str, Any]) -> str:
    """What is wrong with one setting: its name, its value, and what is allowed."""
    where: Sequence[str | int] = details["loc"]
    message: str = details["msg"].removeprefix("Value error, ")
    name = ".".join(map(str, where))
    if details["type"] == "extra_forbidden":
        return f"{name}: there is no such setting; allowed here: {', '.join(_names(kind, where[:-1]))}"
    if details["type"] == "value_error" and isinstance(details["input"], dict):  # says itself which of its settings
        return f"{name + '.' if name else ''}{message}"
    return f"{name}: {_shown(details['input'])}: {message}"


def _names(kind: type[BaseModel], where: Sequence[str | int]) -> list[str]:
    """Names of the settings at a place."""
    for part in where:
        annotation = kind.model_fields[str(part)].annotation
        inside = [of for of in (annotation, *get_args(annotation)) if isinstance(of, type) and issubclass(of, Settings)]
        kind = inside[0]
    return sorted(kind.model_fields)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _name_of_bytes(values: Mapping[str, Any]) -> str | None:
    for name, value in values.items():
        if isinstance(value, bytes):
            return name
        if isinstance(value, dict) and (inside := _name_of_bytes(value)):
            return f"{name}.{inside}"
    return None
