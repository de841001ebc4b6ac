"""Settings as a JSON file, which holds what was set and leaves the rest at its defaults.

JSON, because some settings may be ``null``, which TOML can't say, and because YAML would bring types of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from cachecraft_rag.store_config import Settings

S = TypeVar("S", bound=Settings)

_LONGEST_VALUE = 80  # characters of a refused value that a message shows
_CREDENTIALS = re.compile(r"://[^/\s]*@")  # of a URL
_SECRET = "master_key"  # whose value no message shows, as messages end up in logs


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
        values = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_once, parse_constant=_no_number)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: this is no JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f'{path}: {_shown(values)} is no JSON object; give {{"setting": value, ...}}')
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        found = problems(kind, error, {})
        raise ValueError("\n".join(f"{path}: {problem}" for problem in found)) from None  # it would say all again


def problems(kind: type[BaseModel], error: ValidationError, names: Mapping[str, str]) -> list[str]:
    """What is wrong with each of some settings: its name, its value, and what is allowed.

    Args:
        kind: Which settings.
        error: How they were refused.
        names: What settings are called where they come from, by their name as in ``"cold.size"``; the others go by it.
    """
    messages: dict[str, list[str]] = {}  # a setting that may be of several types is refused once for each
    for details in error.errors():
        head, message = _problem(kind, details, names)
        messages.setdefault(head, []).append(message)
    return [head + "; ".join(found) for head, found in messages.items()]


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


def _problem(kind: type[BaseModel], details: Mapping[str, Any], names: Mapping[str, str]) -> tuple[str, str]:
    """What is wrong with one setting: its name and value, and behind them what is allowed."""
    place, inside = _place(kind, details["loc"])
    message: str = details["msg"].removeprefix("Value error, ")
    name = names.get(".".join(place), ".".join(place))
    if details["type"] == "extra_forbidden":
        return f"{name}: ", f"there is no such setting; allowed here: {', '.join(sorted(inside.model_fields))}"
    if details["type"] == "value_error" and isinstance(details["input"], dict):  # says itself which of its settings
        return f"{name}." if name else "", message
    value = _shown(details["input"])
    is_left_out = place[-1:] == [_SECRET] or message.startswith(f"{value} ")  # which says it itself
    return f"{name}: " if is_left_out else f"{name}: {value}: ", message


def _place(kind: type[BaseModel], where: Sequence[str | int]) -> tuple[list[str], type[BaseModel]]:
    """Names that lead to a setting, and the settings that it is one of.

    Behind them pydantic says which of several types was tried, or which item of a list it was.
    """
    place: list[str] = []
    for part in where:
        place.append(str(part))
        field = kind.model_fields.get(str(part))
        parts = () if field is None else (field.annotation, *get_args(field.annotation))
        inside = [of for of in parts if isinstance(of, type) and issubclass(of, Settings)]
        if not inside:
            break
        if len(place) < len(where):
            kind = inside[0]
    return place, kind


def _shown(value: object) -> str:
    text = repr(value)
    if _SECRET in text:
        return f"a {type(value).__name__} with a {_SECRET}"
    if _CREDENTIALS.search(text):
        return f"a {type(value).__name__} with a password"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _name_of_bytes(values: Mapping[str, Any]) -> str | None:
    for name, value in values.items():
        if isinstance(value, bytes):
            return name
        if isinstance(value, dict) and (inside := _name_of_bytes(value)):
            return f"{name}.{inside}"
    return None
