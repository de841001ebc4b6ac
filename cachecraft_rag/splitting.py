"""Content-defined chunk boundaries: an edit of a document changes the chunks around it and no others.

A text is cut into units (clauses, paragraphs, sentences; longer ones further). Where a unit starts a chunk may start,
and every such boundary has a priority made of its kind and of a hash of the unit, never of its position. Chunks follow
in two steps:

1. A boundary that has the best priority within `region_tokens` on both sides ends a region. Nothing outside a region
   has a say in it.
2. A region is cut at its best boundary that leaves two parts which can be made into chunks of a legal size; then each
   part likewise. So a cut near an edit may move, while the cuts above it stay.
"""

from __future__ import annotations

import copy
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any, Literal
from zlib import crc32

CountMany = Callable[[list[str]], list[int]]

# Kinds of boundaries, best first: 0 to 3 are headings of a preset.
_PARAGRAPH, _SENTENCE, _PHRASE, _WORD, _CHARACTER = 4, 5, 6, 7, 8

_PRESETS: Mapping[str, Mapping[int, str]] = {
    "contract": {
        # A reference such as "pursuant to\nSection 5" at the start of a wrapped line is no heading.
        0: r"#{1,2}\s|(?<![a-z,]\n)(?i:article|exhibit|schedule|annex|appendix|chapter|part)\s+[\dIVXLCA-Z]{1,6}\b",
        1: r"#{3,6}\s|(?<![a-z,]\n)(?i:section)\s+\d"
        r"|\d{1,2}\.\s+[\"\u201c(]?[A-Z]|(?<![;:] )[A-Z][A-Z0-9 ,;&/'\u2019-]{6,78}\r?$",
        2: r"\d{1,2}(?:\.\d{1,3})+\.?\s",
        3: r"\(?(?:[a-z]{1,2}|[ivx]{1,5}|\d{1,2})\)\s",
    },
    "markdown": {
        0: r"#{1,2}\s|\S[^\n]{0,200}\n=+\s*$",
        1: r"#{3}\s|\S[^\n]{0,200}\n-{3,}\s*$",
        2: r"#{4,6}\s",
        _SENTENCE: r"(?:[-*+]|\d{1,3}[.)])\s",
    },
    "plain": {},
}
_FENCED = re.compile(r"^[ \t]*(```|~~~).*?(?:^[ \t]*\1|\Z)", re.MULTILINE | re.DOTALL)
_LINE_END = re.compile(r"\n(?:\s*\n)?")
# The second half is for scripts without spaces: ideographic full stop and full-width signs.
_SENTENCE_END = re.compile(
    r"[.!?;:][\"'\u201d\u2019)\]]*[^\S\n]+(?=\S)"
    r"|[\u3002\uff01\uff1f\uff1b][\u300d\u300f\u201d\u2019\uff09]*(?=[^\s\u300d\u300f\u201d\u2019\uff09])"
)
_PHRASE_ENDS = (";", ":", "\uff1b")
_SENTENCE_ENDS = (".", "!", "?", "\u3002", "\uff01", "\uff1f", *_PHRASE_ENDS)
# What a full stop ends without ending a sentence: numbers of clauses, initials, abbreviations.
_LABEL = re.compile(
    r"(?:^|[\s(\[\"\u201c])(?:[A-Za-z]|\d{1,3}(?:\.\d+)*|[ivxIVX]{1,5}|e\.g|i\.e|"
    r"Nos?|Inc|Ltd|Co|Corp|Sec|Art|Mrs?|Ms|Dr|St|vs|cf)\.\s*$"
)
_TITLE = re.compile(r"[A-Z][A-Za-z ,&'\u2019/-]{2,79}")
_WORDS = re.compile(r"\S+\s*")


@dataclass(frozen=True)
class _Units:
    """Units of a text; unit i is `text[starts[i]:starts[i + 1]]`.

    Attributes:
        starts: First character of each unit, and the length of the text.
        tokens: Tokens before each unit, and in all.
        priorities: Kind and hash of the boundary before each unit; the smallest is best.
    """

    starts: list[int]
    tokens: list[int]
    priorities: list[tuple[int, bytes]]


class ChunkSplitter:
    """Splits a text into chunks of `min_tokens` to `max_tokens` tokens that join to the text again.

    No chunk is above `max_tokens` (but a single character that counts more by itself). The last chunk of a text or of
    a region may be below `min_tokens`, where no boundary gives legal sizes.

    Args:
        count_tokens: Number of tokens of a text; not called where there is a `count_many`.
        min_tokens: Least tokens of a chunk, at least 1.
        max_tokens: Most tokens of a chunk, above `min_tokens`.
        region_tokens: How far a boundary must be the best one to end a region; at least `2 * min_tokens`. More of it
            keeps more chunks within the limits, less of it keeps edits more local. None: `3 * max_tokens`.
        preset: Which headings are known: those of a contract (also Markdown's), of Markdown, or none.
        count_many: Numbers of tokens of several texts, for tokenizers that are faster with a batch.

    Raises:
        ValueError: If an option is out of its range.
    """

    def __init__(
        self,
        count_tokens: Callable[[str], int],
        *,
        min_tokens: int = 512,
        max_tokens: int = 768,
        region_tokens: int | None = None,
        preset: Literal["contract", "markdown", "plain"] = "contract",
        count_many: CountMany | None = None,
    ) -> None:
        if min_tokens < 1:
            raise ValueError(f"min_tokens={min_tokens!r}: must be at least 1")
        if max_tokens <= min_tokens:
            raise ValueError(f"max_tokens={max_tokens!r}: must be above min_tokens={min_tokens}")
        region_tokens = 3 * max_tokens if region_tokens is None else region_tokens
        if region_tokens < 2 * min_tokens:
            raise ValueError(f"region_tokens={region_tokens!r}: must be at least 2 * min_tokens={2 * min_tokens}")
        if preset not in _PRESETS:
            raise ValueError(f"preset={preset!r}: must be one of {', '.join(map(repr, _PRESETS))}")
        self.min_tokens = min_tokens
        self.max_tokens = max_tokens
        self.region_tokens = region_tokens
        self.preset = preset
        self._count = count_many or (lambda texts: [count_tokens(text) for text in texts])
        self._headings = {
            kind: re.compile(rf"\s*(?:{pattern})", re.MULTILINE) for kind, pattern in _PRESETS[preset].items()
        }
        # Fine enough that every window between the limits holds a boundary.
        self._unit_tokens = max(1, min(min_tokens // 4, (max_tokens - min_tokens) // 2))
        # Sizes that are only just legal would leave no choice between boundaries.
        self._slack = (max_tokens - min_tokens) // 6

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, **options: Any) -> ChunkSplitter:
        """A splitter that counts with a Hugging Face tokenizer, as chunks are tokenised: without special tokens.

        Args:
            tokenizer: Fast or slow; a fast one is copied, so that it may be used in another thread meanwhile.
            **options: Those of the constructor but the counting functions.

        Raises:
            ValueError: If it is no tokenizer, or an option is out of its range.
        """
        if not callable(tokenizer):
            raise ValueError(f"tokenizer={tokenizer!r}: must be a Hugging Face tokenizer")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:

            def count_tokens(text: str) -> int:
                return len(
                    tokenizer(_encodable(text), add_special_tokens=False, split_special_tokens=True)["input_ids"]
                )

            return cls(count_tokens, **options)
        backend = copy.deepcopy(backend)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True

        def count_many(texts: list[str]) -> list[int]:
            return [len(e) for e in backend.encode_batch_fast([*map(_encodable, texts)], add_special_tokens=False)]

        return cls(lambda text: count_many([text])[0], count_many=count_many, **options)

    def split(self, text: str) -> list[str]:
        """Chunks of a text, in order; their join is the text. An empty text has none."""
        return [text[start:end] for start, end in self.split_spans(text)]

    def split_spans(self, text: str) -> list[tuple[int, int]]:
        """Character ranges of the chunks of a text, in order, without gaps."""
        if not text:
            return []
        units = self._units(text)
        cuts = self._region_cuts(units)
        parts = [*pairwise(cuts)][::-1]
        ends = [0]
        while parts:
            begin, end = parts.pop()
            cut = self._best_cut(units, begin, end)
            if cut is None:
                ends.append(end)
            else:
                parts += [(cut, end), (begin, cut)]
        return self._within_limit(text, units, ends)

    def _units(self, text: str) -> _Units:
        """Cuts a text into units of at most `_unit_tokens` tokens, counting every unit once."""
        bounds = [(0, _PARAGRAPH), *sorted(self._boundaries(text).items())]
        known: dict[tuple[int, int], int] = {}
        for finer in (*_FINER, None):
            spans = [*pairwise([*(_with_space(text, start) for start, _ in bounds), len(text)])]
            new = [span for span in spans if span not in known]
            known.update(zip(new, self._count([text[start:end] for start, end in new]), strict=True))
            counts = [known[span] for span in spans]
            if finer is None or max(counts) <= self._unit_tokens:
                break
            ends = [*(start for start, _ in bounds[1:]), len(text)]
            bounds = [
                part
                for bound, end, count in zip(bounds, ends, counts, strict=True)
                for part in (bound, *(finer(text, bound[0], end) if count > self._unit_tokens else ()))
            ]
        starts = [*(start for start, _ in bounds), len(text)]
        priorities = [(kind, _hash(text[start:end])) for (start, kind), end in zip(bounds, starts[1:], strict=True)]
        return _Units(starts, [0, *accumulate(counts)], priorities)

    def _boundaries(self, text: str) -> dict[int, int]:
        """Where lines, paragraphs and sentences start, and the kind of each; headings may stand within a line."""
        kinds: dict[int, int] = {}
        last = len(text.rstrip())
        start, heading = 0, self._heading_kind(text, 0)
        for match in _LINE_END.finditer(text, 0, last):
            line = text[start : match.start()].strip()
            is_title = len(line) <= 80 and not line.endswith(_SENTENCE_ENDS)
            is_title = is_title and (heading <= 2 or _TITLE.fullmatch(line) is not None)
            kind = _SENTENCE if line.endswith(_SENTENCE_ENDS) else _PHRASE
            kind = _PARAGRAPH if len(match.group()) > 1 else kind
            start = match.end()
            heading = self._heading_kind(text, start)
            # A title stays with what follows it, be it another title.
            kinds[start] = _PHRASE if is_title else min(kind, heading)
        for match in _SENTENCE_END.finditer(text, 0, last):
            if not match.group().startswith(".") or not _LABEL.search(text, max(0, match.start() - 8), match.end()):
                kind = _PHRASE if match.group().startswith(_PHRASE_ENDS) else _SENTENCE
                kinds[match.end()] = min(kind, self._heading_kind(text, match.end()))
        kinds.pop(0, None)
        if self.preset == "markdown":
            # A "#" in code is a comment; code is cut only where nothing else helps.
            starts = sorted(kinds)
            for fence in _FENCED.finditer(text):
                for start in starts[bisect_right(starts, fence.start()) : bisect_left(starts, fence.end())]:
                    kinds[start] = max(kinds[start], _PHRASE)
        return kinds

    def _heading_kind(self, text: str, start: int) -> int:
        return next((kind for kind, pattern in self._headings.items() if pattern.match(text, start)), _CHARACTER)

    def _region_cuts(self, units: _Units) -> list[int]:
        """First unit of each region, and the number of units. Of equal boundaries the first is the best."""
        tokens, priorities = units.tokens, units.priorities
        cuts = [0]
        first = bisect_left(tokens, self.min_tokens)
        for index in range(max(1, first), bisect_right(tokens, tokens[-1] - self.min_tokens)):
            low = bisect_right(tokens, tokens[index] - self.region_tokens)
            high = bisect_left(tokens, tokens[index] + self.region_tokens)
            best = priorities[index]
            if all(priorities[other] > best for other in range(index - 1, max(1, low) - 1, -1)) and all(
                priorities[other] >= best for other in range(index + 1, min(high, len(priorities)))
            ):
                cuts.append(index)
        return [*cuts, len(priorities)]

    def _best_cut(self, units: _Units, begin: int, end: int) -> int | None:
        """Where to cut units `begin` to `end`; None if they are one chunk."""
        tokens = units.tokens
        size = tokens[end] - tokens[begin]
        if size <= self.max_tokens or end - begin == 1:
            return None
        for slack in (self._slack, 0):
            allowed = [
                index
                for index in range(begin + 1, end)
                if self._is_divisible(tokens[index] - tokens[begin], slack)
                and self._is_divisible(tokens[end] - tokens[index], slack)
            ]
            if allowed:
                return self._best_of(units, allowed, tokens[begin] + tokens[end])
        # One part has to be too small: the last.
        longest = max(begin + 1, bisect_right(tokens, tokens[begin] + self.max_tokens, begin, end) - 1)
        shortest = bisect_left(tokens, tokens[begin] + self.min_tokens, begin + 1, longest)
        return self._best_of(units, range(shortest, longest + 1), tokens[begin] + tokens[end])

    def _is_divisible(self, size: int, slack: int) -> bool:
        """Whether chunks of legal sizes can make up `size` tokens, with `slack` tokens of choice for each cut."""
        num_chunks = max(1, -(-(size - slack) // (self.max_tokens - slack)))
        return size >= num_chunks * self.min_tokens + (num_chunks - 1) * slack

    def _best_of(self, units: _Units, indices: Sequence[int], twice_middle: int) -> int:
        """The best of some boundaries; of equal ones (repeated text) that nearest to the middle."""
        best = min(units.priorities[index] for index in indices)
        equal = [index for index in indices if units.priorities[index] == best]
        return min(equal, key=lambda index: abs(2 * units.tokens[index] - twice_middle))

    def _within_limit(self, text: str, units: _Units, ends: list[int]) -> list[tuple[int, int]]:
        """Spans of chunks that end before these units; true counts, since units may count less alone than joined."""
        spans = [(units.starts[begin], units.starts[end]) for begin, end in pairwise(ends)]
        counts = self._count([text[start:end] for start, end in spans])
        checked: list[tuple[int, int]] = []
        pending = [*zip(spans, counts, strict=True)][::-1]
        while pending:
            (start, end), count = pending.pop()
            if count <= self.max_tokens or end - start == 1:
                checked.append((start, end))
                continue
            middle = (start + end) // 2
            starts = units.starts[bisect_right(units.starts, start) : bisect_left(units.starts, end)]
            cut = min(starts, key=lambda at: abs(at - middle), default=middle)
            halves = [(start, cut), (cut, end)]
            halves_counts = self._count([text[a:b] for a, b in halves])
            pending += [*zip(halves, halves_counts, strict=True)][::-1]
        return checked


def _hash(unit: str) -> bytes:
    """Hash of the start of a unit, however its whitespace is."""
    return blake2b(" ".join(unit[:400].split())[:200].encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _encodable(text: str) -> str:
    """The text with lone surrogates, which no tokenizer takes, replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _with_space(text: str, start: int) -> int:
    """Start of what is counted for a unit: tokenizers put the last space before a word into the word's token."""
    return start - 1 if start > 0 and text[start - 1] == " " else start


def _word_starts(text: str, start: int, end: int, *, every: int) -> Iterator[tuple[int, int]]:
    """Boundaries within a unit: after commas, and on average after every so many words, chosen by the word."""
    for word, following in pairwise(_WORDS.finditer(text, start, end)):
        if word.group().rstrip()[-1] in ",\uff0c\u3001":
            yield following.start(), _PHRASE
        elif crc32(word.group().strip().encode("utf-8", "surrogatepass")) % every == 0:
            yield following.start(), _WORD


def _character_starts(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Boundaries within a word: on average after every 16 characters, chosen by the four before."""
    for at in range(start + 1, end):
        if crc32(text[max(start, at - 4) : at].encode("utf-8", "surrogatepass")) % 16 == 0:
            yield at, _CHARACTER


def _equal_steps(text: str, start: int, end: int, *, step: int) -> Iterator[tuple[int, int]]:
    """Boundaries within what has none of its own, such as a character repeated."""
    for at in range(start + step, end, step):
        yield at, _CHARACTER


_FINER = (
    partial(_word_starts, every=16),
    partial(_word_starts, every=1),
    _character_starts,
    partial(_equal_steps, step=64),
    partial(_equal_steps, step=1),
)
