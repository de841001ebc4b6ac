"""Lists that are given as one argument, by commas."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

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
