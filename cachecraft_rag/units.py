"""A text as units that chunks are made of: clauses, paragraphs, sentences; and pieces of those that are too long."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import accumulate, pairwise
from zlib import crc32

from cachecraft_rag.headings import CHARACTER, MAX_TITLE, PARAGRAPH, PHRASE, SENTENCE, SENTENCE_ENDS, WORD, Headings

CountMany = Callable[[list[str]], list[int]]

_Finer = Callable[[str, int, int], Iterator[tuple[int, int]]]
_Bounds = list[tuple[int, int]]  # where units start, and the kind of each boundary
_LONG_TOKEN = 8  # characters: a unit with this many for each token it may have is cut without being counted

_LINE_END = re.compile(r"\n(?:\s*\n)?")
# The second half is for scripts without spaces: ideographic full stop and full-width signs.
_SENTENCE_END = re.compile(
    r"[.!?;:][\"'\u201d\u2019)\]]*[^\S\n]+(?=\S)"
    r"|[\u3002\uff01\uff1f\uff1b][\u300d\u300f\u201d\u2019\uff09]*(?=[^\s\u300d\u300f\u201d\u2019\uff09])"
)
_PHRASE_ENDS = (";", ":", "\uff1b")
# What a full stop ends without ending a sentence: numbers of clauses, initials, abbreviations.
_LABEL = re.compile(
    r"(?:^|[\s(\[\"\u201c])(?:[A-Za-z]|\d{1,3}(?:\.\d+)*|[ivxIVX]{1,5}|e\.g|i\.e|"
    r"Nos?|Inc|Ltd|Co|Corp|Sec|Art|Mrs?|Ms|Dr|St|vs|cf)\.\s*$"
)
_TITLE = re.compile(r"[A-Z][A-Za-z ,&'\u2019/-]{2,79}")
_WORDS = re.compile(r"\S+\s*")


@dataclass(frozen=True)
class Units:
    """Units of a text; unit i is `text[starts[i]:starts[i + 1]]`.

    Attributes:
        starts: First character of each unit, and the length of the text.
        tokens: Tokens before each unit, and in all.
        priorities: Kind and hash of the boundary before each unit; the smallest is best.
    """

    starts: list[int]
    tokens: list[int]
    priorities: list[tuple[int, bytes]]


def cut_units(text: str, headings: Headings, count_many: CountMany, max_tokens: int) -> Units:
    """Cuts a text into units, counting every unit once.

    Args:
        text: The text; not empty.
        headings: Those that are known.
        count_many: Numbers of tokens of several texts.
        max_tokens: Most tokens of a unit.
    """
    bounds = [(0, PARAGRAPH), *sorted(_boundaries(text, headings).items())]
    lengths = [end - start for start, end in _spans(bounds, len(text))]
    bounds = _refined(text, bounds, [length > _LONG_TOKEN * max_tokens for length in lengths], _FINER[0])
    known: dict[tuple[int, int], int] = {}
    for finer in (*_FINER, None):
        spans = _spans([(_with_space(text, start), kind) for start, kind in bounds], len(text))
        new = [span for span in spans if span not in known]
        known.update(zip(new, count_many([text[start:end] for start, end in new]), strict=True))
        counts = [known[span] for span in spans]
        if finer is None or max(counts) <= max_tokens:
            break
        bounds = _refined(text, bounds, [count > max_tokens for count in counts], finer)
    starts = [*(start for start, _ in bounds), len(text)]
    priorities = [(kind, _hash(text[start:end])) for (start, kind), end in zip(bounds, starts[1:], strict=True)]
    return Units(starts, [0, *accumulate(counts)], priorities)


def _spans(bounds: _Bounds, end: int) -> list[tuple[int, int]]:
    return [*pairwise([*(start for start, _ in bounds), end])]


def _refined(text: str, bounds: _Bounds, is_long: Sequence[bool], finer: _Finer) -> _Bounds:
    """The bounds, and more within the long units."""
    return [
        part
        for bound, (start, end), cut in zip(bounds, _spans(bounds, len(text)), is_long, strict=True)
        for part in (bound, *(finer(text, start, end) if cut else ()))
    ]


def _boundaries(text: str, headings: Headings) -> dict[int, int]:
    """Where lines, paragraphs and sentences start, and the kind of each; headings may stand within a line."""
    kinds: dict[int, int] = {}
    last = len(text.rstrip())
    start, heading = 0, headings.kind(text, 0)
    for match in _LINE_END.finditer(text, 0, last):
        line = text[start : match.start()].strip()
        is_title = len(line) <= MAX_TITLE and not line.endswith(SENTENCE_ENDS)
        is_title = is_title and (heading <= 2 or _TITLE.fullmatch(line) is not None)
        kind = SENTENCE if line.endswith(SENTENCE_ENDS) else PHRASE
        kind = PARAGRAPH if len(match.group()) > 1 else kind
        start = match.end()
        heading = headings.kind(text, start)
        # A title stays with what follows it, be it another title.
        kinds[start] = PHRASE if is_title else min(kind, heading)
    for match in _SENTENCE_END.finditer(text, 0, last):
        if not match.group().startswith(".") or not _LABEL.search(text, max(0, match.start() - 8), match.end()):
            kind = PHRASE if match.group().startswith(_PHRASE_ENDS) else SENTENCE
            kinds[match.end()] = min(kind, headings.kind(text, match.end()))
    kinds.pop(0, None)
    if code := headings.code(text):
        # Code is cut only where nothing else helps.
        starts = sorted(kinds)
        for begin, end in code:
            for start in starts[bisect_right(starts, begin) : bisect_left(starts, end)]:
                kinds[start] = max(kinds[start], PHRASE)
    return kinds


def _hash(unit: str) -> bytes:
    """Hash of the start of a unit, however its whitespace is."""
    return blake2b(" ".join(unit[:400].split())[:200].encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _with_space(text: str, start: int) -> int:
    """Start of what is counted for a unit: tokenizers put the last space before a word into the word's token."""
    return start - 1 if start > 0 and text[start - 1] == " " else start


def _word_starts(text: str, start: int, end: int, *, every: int) -> Iterator[tuple[int, int]]:
    """Boundaries within a unit: after commas, and on average after every so many words, chosen by the word."""
    for word, following in pairwise(_WORDS.finditer(text, start, end)):
        if word.group().rstrip()[-1] in ",\uff0c\u3001":
            yield following.start(), PHRASE
        elif crc32(word.group().strip().encode("utf-8", "surrogatepass")) % every == 0:
            yield following.start(), WORD


def _character_starts(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Boundaries within a word: on average after every 16 characters, chosen by the four before."""
    for at in range(start + 1, end):
        if crc32(text[max(start, at - 4) : at].encode("utf-8", "surrogatepass")) % 16 == 0:
            yield at, CHARACTER


def _equal_steps(text: str, start: int, end: int, *, step: int) -> Iterator[tuple[int, int]]:
    """Boundaries within what has none of its own, such as a character repeated."""
    for at in range(start + step, end, step):
        yield at, CHARACTER


_FINER: tuple[_Finer, ...] = (
    partial(_word_starts, every=16),
    partial(_word_starts, every=1),
    _character_starts,
    partial(_equal_steps, step=64),
    partial(_equal_steps, step=1),
)
