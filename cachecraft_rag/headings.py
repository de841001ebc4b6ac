"""Headings of contracts and of Markdown: where they stand, how good a place to cut they are, and how they nest."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Preset = Literal["contract", "markdown", "plain"]

# Kinds of boundaries, best first; those before PARAGRAPH are for headings, and for items such as "(a)".
ITEM, PARAGRAPH, SENTENCE, PHRASE, WORD, CHARACTER = 3, 4, 5, 6, 7, 8

SENTENCE_ENDS = (".", "!", "?", "\u3002", "\uff01", "\uff1f", ";", ":", "\uff1b")
MAX_TITLE = 80  # characters: a longer line is text

_MAX_RUN_IN = 60  # characters of a title with text behind it in its line
# A reference such as "pursuant to\nSection 5" at the start of a wrapped line is no heading.
_LINE = r"(?<![a-z,]\n)"
_NUMBER = r"\s+[\dIVXLCA-Z]{1,6}\b"


class _Style(NamedTuple):
    """A kind of boundary, and how the headings begin that stand behind it."""

    kind: int
    pattern: str


# The highest first: a heading ends the sections of its own style and of those after it.
_STYLES: Mapping[Preset, Sequence[_Style]] = {
    "contract": (
        _Style(0, r"#\s"),
        _Style(0, r"##\s"),
        _Style(1, r"###\s"),
        _Style(1, r"#{4,6}\s"),
        _Style(0, rf"{_LINE}(?i:exhibit|schedule|annex|appendix){_NUMBER}"),
        _Style(0, rf"{_LINE}(?i:part){_NUMBER}"),
        _Style(0, rf"{_LINE}(?i:chapter){_NUMBER}"),
        _Style(0, rf"{_LINE}(?i:article){_NUMBER}"),
        _Style(1, r"(?<![;:] )[A-Z][A-Z0-9 ,;&/'\u2019-]{6,78}\r?$"),
        _Style(1, rf"{_LINE}(?i:section)\s+\d"),
        _Style(1, r"\d{1,2}\.\s+[\"\u201c(]?[A-Z]"),
        _Style(2, r"\d{1,2}\.\d{1,3}\.?\s"),
        _Style(2, r"\d{1,2}(?:\.\d{1,3}){2,}\.?\s"),
    ),
    "markdown": (
        _Style(0, r"#\s|\S[^\n]{0,200}\n=+\s*$"),
        _Style(0, r"##\s"),
        _Style(1, r"\S[^\n]{0,200}\n-{3,}\s*$"),
        _Style(1, r"###\s"),
        _Style(2, r"####\s"),
        _Style(2, r"#{5,6}\s"),
    ),
    "plain": (),
}
_ITEMS: Mapping[Preset, Sequence[_Style]] = {
    "contract": (_Style(ITEM, r"\(?(?:[a-z]{1,2}|[ivx]{1,5}|\d{1,2})\)\s"),),
    "markdown": (_Style(SENTENCE, r"(?:[-*+]|\d{1,3}[.)])\s"),),
    "plain": (),
}
_FENCED = re.compile(r"^[ \t]*(```|~~~).*?(?:^[ \t]*\1|\Z)", re.MULTILINE | re.DOTALL)
_LINES = re.compile(r"^[^\S\n]*(\S[^\n]*)", re.MULTILINE)
_LABEL = re.compile(
    r"(?:(?i:exhibit|schedule|annex|appendix|part|chapter|article|section)\s+[\dA-Z]{1,6}|\d{1,2})[.\d]*"
)
_TITLE_END = re.compile(r"[.:;](?=\s|$)|\s{2,}|\s[-\u2013\u2014]+\s")


@dataclass(frozen=True)
class Heading:
    """A heading of a text.

    Attributes:
        start: Its first character.
        level: How high it is: 0 is the highest.
        title: Its text on one line, shortened to the number where it runs on into text.
    """

    start: int
    level: int
    title: str


class Headings:
    """The headings that a preset knows.

    Args:
        preset: Those of a contract (also Markdown's), of Markdown, or none.

    Raises:
        ValueError: There is no such preset.
    """

    def __init__(self, preset: Preset) -> None:
        if preset not in _STYLES:
            raise ValueError(f"preset={preset!r}: must be one of {', '.join(map(repr, _STYLES))}")
        self.preset = preset
        by_kind: dict[int, list[str]] = {}
        for style in (*_STYLES[preset], *_ITEMS[preset]):
            by_kind.setdefault(style.kind, []).append(style.pattern)
        self._kinds = {kind: _compiled("|".join(patterns)) for kind, patterns in sorted(by_kind.items())}
        self._levels = [_compiled(style.pattern) for style in _STYLES[preset]]

    def kind(self, text: str, start: int) -> int:
        """Kind of a boundary for what begins there; CHARACTER if that is neither a heading nor an item."""
        return next((kind for kind, pattern in self._kinds.items() if pattern.match(text, start)), CHARACTER)

    def code(self, text: str) -> list[tuple[int, int]]:
        """Where fenced code stands, in which a "#" is a comment."""
        return [match.span() for match in _FENCED.finditer(text)] if self.preset == "markdown" else []

    def find(self, text: str) -> Iterator[Heading]:
        """The headings of a text that stand at the start of a line, in order."""
        code = self.code(text)
        lines = [*_LINES.finditer(text)] if self._levels else []
        taken = -1
        for number, match in enumerate(lines):
            start, line = match.start(1), match.group(1)
            level = self._level(text, start)
            if level is None or number == taken or any(first <= start < end for first, end in code):
                continue
            title = _title(line)
            following = lines[number + 1].group(1).strip() if number + 1 < len(lines) else ""
            if _LABEL.fullmatch(line.strip()) and _is_title(following):
                title, taken = f"{title} {_title(following)}", number + 1
            yield Heading(start, level, title)

    def _level(self, text: str, start: int) -> int | None:
        return next((level for level, pattern in enumerate(self._levels) if pattern.match(text, start)), None)


class Outline:
    """Which headings hold where in a text.

    Args:
        headings: The headings of the text, in order.
    """

    def __init__(self, headings: Sequence[Heading]) -> None:
        self._starts = [heading.start for heading in headings]
        self._paths: list[tuple[str, ...]] = []
        open_sections: list[Heading] = []
        for heading in headings:
            open_sections = [section for section in open_sections if section.level < heading.level]
            open_sections.append(heading)
            self._paths.append(tuple(section.title for section in open_sections))

    def path(self, at: int) -> tuple[str, ...]:
        """Titles of the sections that a character stands in, the highest first."""
        index = bisect_right(self._starts, at) - 1
        return self._paths[index] if index >= 0 else ()


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"\s*(?:{pattern})", re.MULTILINE)


def _is_title(line: str) -> bool:
    """Whether a line can be the title of a number that stands alone in the line before."""
    return (
        0 < len(line) <= MAX_TITLE
        and not line.endswith(SENTENCE_ENDS)
        and not re.match(r"#|\(", line)
        and not _LABEL.match(line)
    )


def _title(line: str) -> str:
    """What names a section in the line that begins it."""
    line = line.strip().strip("#").strip()
    label = _LABEL.match(line)
    if label is None:
        return " ".join(line[:MAX_TITLE].split())
    name = line[label.end() :].strip(" \t-\u2013\u2014.:")
    name = _TITLE_END.split(name, maxsplit=1)[0]
    name = name if len(name) <= _MAX_RUN_IN else ""
    return " ".join(f"{label.group().rstrip('.')} {name}".split())
