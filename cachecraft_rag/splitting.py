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
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from cachecraft_rag.headings import Headings, Outline, Preset
from cachecraft_rag.units import CountMany, Units, cut_units


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
        preset: Preset = "contract",
        count_many: CountMany | None = None,
    ) -> None:
        if min_tokens < 1:
            raise ValueError(f"min_tokens={min_tokens!r}: must be at least 1")
        if max_tokens <= min_tokens:
            raise ValueError(f"max_tokens={max_tokens!r}: must be above min_tokens={min_tokens}")
        region_tokens = 3 * max_tokens if region_tokens is None else region_tokens
        if region_tokens < 2 * min_tokens:
            raise ValueError(f"region_tokens={region_tokens!r}: must be at least 2 * min_tokens={2 * min_tokens}")
        self.min_tokens = min_tokens
        self.max_tokens = max_tokens
        self.region_tokens = region_tokens
        self.preset = preset
        self._count = count_many or (lambda texts: [count_tokens(text) for text in texts])
        self._headings = Headings(preset)
        # Fine enough that every window between the limits holds a boundary.
        self._unit_tokens = max(1, min(min_tokens // 8, (max_tokens - min_tokens) // 4))
        # Sizes that are only just legal would leave no choice between boundaries.
        self._slack = (max_tokens - min_tokens) // 18

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
        units = cut_units(text, self._headings, self._count, self._unit_tokens)
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

    def breadcrumbs(self, text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[str, ...]]:
        """For each chunk, the titles of the sections that it starts in, the highest first.

        A heading that a chunk starts with is among them; the preset `plain` knows none.

        Args:
            text: The text.
            spans: Character ranges of its chunks, as `split_spans` gives them.
        """
        outline = Outline([*self._headings.find(text)])
        blank = [len(text[start:end]) - len(text[start:end].lstrip()) for start, end in spans]
        return [outline.path(start + skipped) for (start, _), skipped in zip(spans, blank, strict=True)]

    def _region_cuts(self, units: Units) -> list[int]:
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

    def _best_cut(self, units: Units, begin: int, end: int) -> int | None:
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

    def _best_of(self, units: Units, indices: Sequence[int], twice_middle: int) -> int:
        """The best of some boundaries; of equal ones (repeated text) that nearest to the middle."""
        best = min(units.priorities[index] for index in indices)
        equal = [index for index in indices if units.priorities[index] == best]
        return min(equal, key=lambda index: abs(2 * units.tokens[index] - twice_middle))

    def _within_limit(self, text: str, units: Units, ends: list[int]) -> list[tuple[int, int]]:
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


def _encodable(text: str) -> str:
    """The text with lone surrogates, which no tokenizer takes, replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")
