"""Which of a chunk's variants is used, and which are kept: the same chunk made behind different prefixes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ConfigDict, TypeAdapter

from cachecraft_rag.cfo import (
    MIN_CCI,
    adjusted_overlap,
    cache_fix_overhead,
    chunk_context_impact,
    mean_inter,
    mean_intra,
    order_penalty,
    prefix_overlap,
)


@dataclass(frozen=True)
class Prefix:
    """What stands before a chunk.

    Attributes:
        chunks: Hashes of the preceding chunks, in order (``ChunkKey.chunk``).
        context: ``context_hash`` of all preceding tokens, those between the chunks included. Two prefixes of the same
            chunks may differ in it; equal ones are the same tokens.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    chunks: tuple[str, ...]
    context: str


@dataclass(frozen=True)
class VariantInfo:
    """What is known of one stored variant of a chunk.

    Attributes:
        prefix: What its KV was made behind.
        inter: Attention that its tokens paid to each chunk of the prefix, over all heads and layers.
        a_bar: Attention to the preceding chunks per pair of tokens (see ``cfo.mean_inter``).
        b_bar: Attention inside the chunk per pair of tokens (see ``cfo.mean_intra``).
        num_tokens: Tokens of the chunk.
        is_exact: Whether every token before it and in it was computed when it was made. ``False`` when some KV was
            reused from elsewhere: such a variant is never exact, whatever stands before it.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    prefix: Prefix
    inter: tuple[float, ...]
    a_bar: float
    b_bar: float
    num_tokens: int
    is_exact: bool

    def __post_init__(self) -> None:
        if len(self.inter) != len(self.prefix.chunks):
            raise ValueError(
                f"inter: {len(self.inter)} figures; give one for each of {len(self.prefix.chunks)} preceding chunks"
            )
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens: {self.num_tokens} is no length of a chunk; give 1 token or more")
        for name, value in (("a_bar", self.a_bar), ("b_bar", self.b_bar), *(("inter", paid) for paid in self.inter)):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name}: {value} is not a finite number of 0 or more")

    @classmethod
    def alone(cls, context: str, num_tokens: int) -> VariantInfo:
        """Of KV that was made behind no chunk; nothing needs to be recorded for it.

        Args:
            context: ``context_hash`` of what it was made behind: a canonical prefix, or nothing.
            num_tokens: Tokens of the chunk.
        """
        return cls(Prefix((), context), (), 0.0, 0.0, num_tokens, is_exact=True)

    @classmethod
    def recorded(
        cls,
        prefix: Prefix,
        lengths: Sequence[int],
        inter: Sequence[Sequence[float]],
        intra: Sequence[float],
        num_tokens: int,
        is_exact: bool,
    ) -> VariantInfo:
        """Of KV that was made behind other chunks, from the attention that was recorded then.

        Args:
            prefix: What stood before the chunk.
            lengths: Tokens of each preceding chunk.
            inter: Per layer, the attention that the chunk paid to each preceding chunk.
            intra: Per layer, the attention inside the chunk.
            num_tokens: Tokens of the chunk.
            is_exact: Whether all KV that it attended to had been computed in place.
        """
        a_bar, b_bar = mean_inter(inter, lengths, num_tokens), mean_intra(intra, num_tokens)
        totals = tuple(float(sum(layer[index] for layer in inter)) for index in range(len(lengths)))
        return cls(prefix, totals, a_bar, b_bar, num_tokens, is_exact)

    @property
    def cci(self) -> float:
        """Cache context impact, in [0.5, 1)."""
        return chunk_context_impact(self.a_bar, self.b_bar)

    def is_exact_behind(self, prefix: Prefix) -> bool:
        """Whether a full prefill behind this prefix would compute this KV: it can be reused as it is."""
        return self.is_exact and self.prefix.context == prefix.context

    def overhead(self, prefix: Prefix, alpha: float) -> float:
        """CFO behind a new prefix: 0.0 when exact, else by Eq. 12, but not below a floor.

        Eq. 12 counts what has gone or moved; it knows no price for what is new, so that it would reuse KV made behind
        nothing as it is behind anything. The floor counts the unseen share of the new prefix at the lowest CCI, the one
        of a chunk that recorded no attention to it:

        * made from exact KV: the share of preceding chunks that it was not made behind, the text around the chunks
          counting as one of them, because it differs or the variant would be exact. KV made alone gets alpha / 2;
        * made from approximate KV: all of it. Its record was taken over keys and values that were partly wrong, so it
          proves nothing, and it must not seem cheaper than KV made alone: it would be preferred, used to make the next
          approximate variant, and errors would add up.

        Args:
            prefix: What stands before the chunk now.
            alpha: Strength of the correction.
        """
        if self.is_exact_behind(prefix):
            return 0.0
        old, new = self.prefix.chunks, prefix.chunks
        overlap = adjusted_overlap(prefix_overlap(old, new, self.inter), order_penalty(old, new))
        seen = (Counter(old) & Counter(new)).total() if self.is_exact else 0
        floor = cache_fix_overhead(alpha, MIN_CCI, seen / (len(new) + 1))
        return max(floor, cache_fix_overhead(alpha, self.cci, overlap))

    @property
    def nbytes(self) -> int:
        """About what it takes in memory: 40 bytes per preceding chunk, and a little."""
        return 128 + 40 * len(self.inter)

    def to_json(self) -> bytes:
        """As JSON in UTF-8; floats keep every bit."""
        return _JSON.dump_json(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> VariantInfo:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: It is something else; the message names the field.
        """
        return _JSON.validate_json(data)


_JSON = TypeAdapter(VariantInfo)


def choose_variant(candidates: Sequence[VariantInfo], prefix: Prefix, alpha: float) -> tuple[int, float] | None:
    """The variant that needs the least recompute behind a prefix.

    Args:
        candidates: The variants of one chunk.
        prefix: What stands before the chunk now.
        alpha: Strength of the correction.

    Returns:
        Its index and CFO; ``None`` without candidates. Of equal ones an exact match goes first, then one made from
        exact KV, then the first.
    """
    ranked = [
        (info.overhead(prefix, alpha), not info.is_exact_behind(prefix), not info.is_exact, index)
        for index, info in enumerate(candidates)
    ]
    if not ranked:
        return None
    cfo, _, _, index = min(ranked)
    return index, cfo


def which_to_drop(candidates: Sequence[VariantInfo], uses: Sequence[float], limit: int, alpha: float) -> list[int]:
    """The variants of one chunk that go so that at most ``limit`` stay.

    Those that save least go: uses * num_tokens * (1 - CFO), with the CFO behind a prefix of which nothing is known yet
    (beta' = 0), so that low CCI is kept first. Of equal ones those made from approximate KV go first, then the least
    used (a large alpha leaves all without a saving but where they are exact), then the highest CCI (a variant never
    used saves nothing yet; KV made alone stays longest), then the oldest.

    Args:
        candidates: The variants, oldest first.
        uses: How often each was used, aged or not, 0 or more.
        limit: How many may stay, 0 or more.
        alpha: Strength of the correction.

    Returns:
        Their indices, increasing.

    Raises:
        ValueError: ``uses`` does not hold one figure per candidate, or an argument is below 0.
    """
    if len(uses) != len(candidates):
        raise ValueError(f"uses: {len(uses)} figures; give one for each of {len(candidates)} candidates")
    if any(not count >= 0 for count in uses):
        raise ValueError(f"uses: {min(uses)} is below 0")
    if limit < 0:
        raise ValueError(f"limit: {limit} is below 0")

    def worth(index: int) -> tuple[float, bool, float, float]:
        info = candidates[index]
        saving = uses[index] * info.num_tokens * (1.0 - cache_fix_overhead(alpha, info.cci, 0.0))
        return saving, info.is_exact, uses[index], -info.cci

    order = sorted(range(len(candidates)), key=worth)  # stable: the oldest of equal ones first
    return sorted(order[: max(0, len(candidates) - limit)])
