"""A piece of a chunk in tokens: cut to the borders of the chunk's own tokens, so that its stored KV fits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import count

from cachecraft_rag.pieces import PieceSpan
from cachecraft_rag.segment_tokenizer import SegmentTokenizer

#: Shorter pieces are left to be computed with the text around them.
MIN_TOKENS = 16
#: Tokens given up at an end, one by one, until the rest reads the same alone as in the chunk.
MAX_TRIMMED = 8


@dataclass(frozen=True)
class PieceTokens:
    """Which tokens of a chunk a piece consists of.

    Attributes:
        start: First character of the piece in the prompt, at the border of a token.
        end: One past its last character.
        whole: Ids of the whole chunk.
        first: Number of the piece's first token in the chunk.
        last: One past the number of its last.
    """

    start: int
    end: int
    whole: tuple[int, ...]
    first: int
    last: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the piece."""
        return self.whole[self.first : self.last]


def tokens_of(piece: PieceSpan, segments: SegmentTokenizer) -> PieceTokens | None:
    """The whole tokens of a chunk that lie in a piece.

    What is cut at the ends is ordinary text of the prompt. The ids are those that the piece gets when it is tokenised
    alone, too: no text gets two kinds of ids.

    Args:
        piece: A piece.
        segments: The tokenizer.

    Returns:
        The tokens; ``None`` when too few are left, or when they would not be those of the text.
    """
    whole = segments.encode_chunk(piece.form)

    @cache
    def before(number: int) -> str:
        return segments.decode(whole[:number])

    def is_border(number: int) -> bool:
        return offset <= len(before(number)) <= offset_end and piece.form.startswith(before(number))

    def num_within(end: int) -> int:
        """About how many tokens of the chunk end at a character or before it; within one, lengths jump a little."""
        low, low_end, high, high_end = 0, 0, len(whole), len(piece.form)
        for step in count():
            if low >= high:
                break
            middle = (low + high + 1) // 2
            if step % 2 == 0:  # tokens are about equally long, so every other time it is guessed from that
                guess = low + round((end - low_end) * (high - low) / max(1, high_end - low_end))
                middle = min(high, max(low + 1, guess))
            middle_end = len(before(middle))
            if middle_end <= end:
                low, low_end = middle, middle_end
            else:
                high, high_end = middle - 1, middle_end
        return low

    offset, offset_end = piece.offset, piece.offset + piece.end - piece.start
    first, last = num_within(offset), num_within(offset_end)
    for _ in range(MAX_TRIMMED):
        while first < last and not is_border(first):  # before the piece, or within a character
            first += 1
        while first < last and not is_border(last):
            last -= 1
        if last - first < MIN_TOKENS:
            return None
        start, end = len(before(first)), len(before(last))
        alone = segments.encode_chunk(piece.form[start:end])
        if alone == whole[first:last]:
            shift = piece.start - offset
            return PieceTokens(start + shift, end + shift, whole, first, last)
        first += first > 0 and alone[:1] != whole[first : first + 1]
        last -= last < len(whole) and alone[-1:] != whole[last - 1 : last]
    return None
