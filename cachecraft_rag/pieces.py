"""Pieces of chunks in a prompt: frameworks cut chunks where a prompt is full.

Only the texts of a namespace that were used last are looked for, since what is cut has just been retrieved. Their forms
are indexed by short slices (anchors): runs of `PROBE_STRIDE` consecutive ones, so near each other that every piece of
`MIN_PIECE_CHARS` holds a whole run. Looking up the prompt at every `PROBE_STRIDE`-th character then meets one of each
run, and from there a match is followed as far as it goes.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from cachecraft_rag.chunk_forms import MAX_FORMS, forms_of

#: Shorter pieces are left to be computed with the text around them: a seam costs more than so few tokens save.
MIN_PIECE_CHARS = 256
#: Texts of a namespace whose pieces are looked for.
RECENT_TEXTS = 64
ANCHOR_CHARS = 32
PROBE_STRIDE = 4
#: Limits of one search, so that boilerplate costs misses, never seconds: places of one anchor that are looked at, the
#: latest first, and matches followed, some in any case and more for long prompts.
PLACES_PER_ANCHOR = 8
SPARE_MATCHES = 256
CHARS_PER_MATCH = 64

# No tokenizer reads a form with half a character, so a piece of it could not be told in tokens.
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_WINDOW = ANCHOR_CHARS + PROBE_STRIDE - 1
_STEP = MIN_PIECE_CHARS - _WINDOW + 1

Range = tuple[int, int]


@dataclass(frozen=True)
class PieceSpan:
    """Character range of a prompt whose text is a part of a registered chunk, in one of its forms.

    Attributes:
        start: First character.
        end: One past the last character.
        text: The chunk's text.
        form: The form of it that the piece is cut from.
        offset: Where the piece begins in the form.
    """

    start: int
    end: int
    text: str
    form: str
    offset: int

    @property
    def origins(self) -> tuple[str, ...]:
        """The registered text that it comes from."""
        return (self.text,)


class PieceIndex:
    """The texts of one namespace that were used last. Not thread-safe.

    Using a text only notes it; it is indexed by the next search, and only if there is something to be searched.

    Args:
        max_texts: How many texts are looked for.
    """

    def __init__(self, max_texts: int = RECENT_TEXTS) -> None:
        self._max_texts = max_texts
        self._recent: OrderedDict[str, None] = OrderedDict()  # latest last
        self._kinds: list[_FormIndex] = []

    def use(self, text: str) -> None:
        """Make a text the latest; the one that was used longest ago may be given up for it."""
        self._recent[text] = None
        self._recent.move_to_end(text)
        if len(self._recent) > self._max_texts:
            self._recent.popitem(last=False)

    def discard(self, text: str) -> None:
        """Look for a text no longer."""
        self._recent.pop(text, None)
        for kind in self._kinds:
            kind.remove(text)

    def release(self) -> None:
        """Give up the index, which the next search makes again."""
        self._kinds = []

    def find(self, prompt: str, ranges: Iterable[Range]) -> list[PieceSpan]:
        """Pieces of the latest texts.

        Where they overlap the longest stays whole, of equally long ones the one that begins its chunk. The work is
        bounded, so that some may be missed; a reported piece is always right.

        Args:
            prompt: Any text.
            ranges: Where to look.

        Returns:
            Pieces of at least ``MIN_PIECE_CHARS`` that don't overlap, ordered by start.
        """
        ranges = [(start, end) for start, end in ranges if end - start >= MIN_PIECE_CHARS]
        if not ranges or not self._recent:
            return []
        self._kinds = self._kinds or [_FormIndex(number) for number in range(MAX_FORMS)]
        plain, *escaped = self._kinds
        matches = plain.matches(self._recent, prompt, ranges)
        if with_escapes := [(start, end) for start, end in ranges if prompt.find("\\", start, end) >= 0]:
            matches += [match for kind in escaped for match in kind.matches(self._recent, prompt, with_escapes)]
        matches.sort(key=lambda match: (match.start - match.end, match.offset > 0, match.start))
        taken: list[PieceSpan] = []
        for match in matches:
            for start, end in apart([(match.start, match.end)], [(span.start, span.end) for span in taken]):
                if end - start >= MIN_PIECE_CHARS:
                    taken.append(PieceSpan(start, end, match.text, match.form, match.offset + start - match.start))
        return sorted(taken, key=lambda span: span.start)


class _FormIndex:
    """One form of some texts: two forms of a text agree between escapes, so a piece must be followed in each.

    Args:
        number: Which of the forms of a text.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._forms: dict[str, str] = {}  # of the texts that are indexed; empty where a text hasn't so many
        self._places: dict[int, list[tuple[str, int]]] = {}  # hash of an anchor -> texts, and where in their form

    def matches(self, texts: Collection[str], prompt: str, ranges: Sequence[Range]) -> list[PieceSpan]:
        """Matches from left to right; within one a few more are followed, in case they are longer."""
        self._index(texts)
        if not self._places:
            return []
        get = self._places.get
        budget = SPARE_MATCHES + sum(end - start for start, end in ranges) // CHARS_PER_MATCH
        followed: dict[tuple[str, int], int] = {}  # by text, and where in the prompt its form would begin
        found: list[PieceSpan] = []
        for first, last in ranges:
            covered, inside = first, 0
            for at in range(first, last - ANCHOR_CHARS + 1, PROBE_STRIDE):
                places = get(hash(prompt[at : at + ANCHOR_CHARS]))
                if places is None or (at < covered and inside == 0):
                    continue
                for text, offset in places[: -PLACES_PER_ANCHOR - 1 : -1]:
                    if at < followed.get((text, at - offset), 0):
                        continue
                    if budget == 0:
                        return found
                    budget -= 1
                    inside -= at < covered and inside > 0
                    form = self._forms[text]
                    start = at - _common_suffix(prompt[max(first, at - offset) : at], form[:offset])
                    end = at + common_prefix(prompt[at : min(last, at - offset + len(form))], form[offset:])
                    followed[text, at - offset] = end
                    if end - start >= MIN_PIECE_CHARS:
                        found.append(PieceSpan(start, end, text, form, offset + start - at))
                        if end > covered:
                            covered, inside = end, PLACES_PER_ANCHOR
        return found

    def remove(self, text: str) -> None:
        """Forget a text, if it is there."""
        form = self._forms.pop(text, "")
        for anchor, _ in _anchors(form):
            places = self._places.pop(anchor, [])
            if others := [place for place in places if place[0] != text]:
                self._places[anchor] = others

    def _index(self, texts: Collection[str]) -> None:
        for text in [text for text in self._forms if text not in texts]:
            self.remove(text)
        for text in [text for text in texts if text not in self._forms]:
            forms = [text] if self._number == 0 else forms_of(text)
            form = forms[self._number] if self._number < len(forms) else ""
            is_usable = len(form) > MIN_PIECE_CHARS and (form.isascii() or not _HALF_CHARACTER.search(form))
            self._forms[text] = form = form if is_usable else ""
            for anchor, offset in _anchors(form):
                self._places.setdefault(anchor, []).append((text, offset))


def apart(ranges: Iterable[Range], taken: Iterable[Range]) -> list[Range]:
    """What of some ranges is not taken.

    Args:
        ranges: Ranges that don't overlap, in order.
        taken: Others that don't overlap, in any order.
    """
    left = []
    taken = sorted(taken)
    ends = [end for _, end in taken]
    for start, end in ranges:
        for other_start, other_end in taken[bisect_left(ends, start) :]:
            if other_start >= end:
                break
            if other_start > start:
                left.append((start, other_start))
            start = max(start, other_end)
        if start < end:
            left.append((start, end))
    return left


def _anchors(form: str) -> Iterator[tuple[int, int]]:
    """Hashes and offsets; rules and runs of spaces match everywhere, so they are left out."""
    for begin in range(0, len(form) - _WINDOW + 1, _STEP):
        if form.count(form[begin], begin, begin + _WINDOW) < _WINDOW // 2:
            for offset in range(begin, begin + PROBE_STRIDE):
                yield hash(form[offset : offset + ANCHOR_CHARS]), offset


def common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """Number of characters, or ids, that two sequences of one type begin with alike."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # alike up to low, and not up to high
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _common_suffix(one: str, other: str) -> int:
    """Number of characters that two texts end with alike."""
    low, high = 0, min(len(one), len(other))
    if one[len(one) - high :] == other[len(other) - high :]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[len(one) - middle : len(one) - low] == other[len(other) - middle : len(other) - low]:
            low = middle
        else:
            high = middle
    return low
