"""What options say: lists by commas, and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from cachecraft_rag.settings_file import problems
from cachecraft_rag.store_config import Settings

S = TypeVar("S", bound=Settings)
N = TypeVar("N", int, float)


def names(text: str) -> list[str]:
    """``"a, b"`` as ``["a", "b"]``; empty parts are left out."""
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers(text: str, kind: Callable[[str], N], option: str) -> list[N]:
    """``"1, 2"`` as numbers of a kind.

    Args:
        text: What was given.
        kind: ``int`` or ``float``.
        option: The option it was given to, for the message.

    Raises:
        ValueError: A part is no such number, or there is none.
    """
    try:
        found = [kind(part) for part in names(text)]
    except ValueError as error:
        raise ValueError(f"{option}: {text!r} is no list of numbers by commas") from error
    if not found:
        raise ValueError(f"{option}: {text!r} holds no number; give at least one")
    return found


def settings(kind: type[S], values: Mapping[str, Any], options: Mapping[str, str]) -> S:
    """Settings that options were given for.

    Args:
        kind: Which settings.
        values: Their values; those of settings inside are in a dict of their own.
        options: The option behind each setting, by its name as in ``"cold.size"``, for the message.

    Raises:
        ValueError: A value is not allowed.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ValueError("\n".join(problems(kind, error, options))) from None  # it would say all again
