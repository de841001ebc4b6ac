"""Texts from files that people write."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str:
    """The text of a file, without the byte order mark that some editors put before it.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: this is no text in UTF-8: {error}; save it as UTF-8") from error
