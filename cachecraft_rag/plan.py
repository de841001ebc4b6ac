"""What happens to every chunk of a prompt, and how many tokens may be recomputed. Integers only, no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from cachecraft_rag.cfo import num_to_recompute


class Action(Enum):
    """What happens to a chunk.

    ``REUSE``: its stored KV is moved to its place. ``ENCODE``: not stored, so its KV is computed alone, stored, and
    then used like stored KV. ``PREFILL``: computed in place, with the prompt around it.
    """

    REUSE = "reuse"
    ENCODE = "encode"
    PREFILL = "prefill"


@dataclass(frozen=True)
class PlannedChunk:
    """A chunk's token range ``[start, end)`` in the prompt and what happens to it.

    Attributes:
        start: Position of its first token.
        end: Position after its last token.
        action: Where its KV comes from.
        is_exact: Whether its KV was computed behind the same tokens that precede it here: nothing to recompute.
        budget: Number of its tokens to recompute; ``None`` where all chunks share the budget.
    """

    start: int
    end: int
    action: Action
    is_exact: bool
    budget: int | None = None


@dataclass(frozen=True)
class RequestPlan:
    """Every token of a prompt belongs to one chunk or is free; free tokens behind the head are always computed.

    Attributes:
        num_tokens: Length of the prompt.
        chunks: The chunks in order.
        ratio: Share of the approximate chunk tokens to recompute.
        head: Number of leading tokens before the first chunk whose KV is stored: they are not computed either.
    """

    num_tokens: int
    chunks: tuple[PlannedChunk, ...]
    ratio: float
    head: int = 0

    @property
    def approximate(self) -> tuple[PlannedChunk, ...]:
        """Chunks whose KV was computed behind something else, so that some tokens should be recomputed."""
        return tuple(c for c in self.chunks if c.action is not Action.PREFILL and not c.is_exact)

    @property
    def num_candidates(self) -> int:
        """Number of tokens of the approximate chunks, without the prompt's last token."""
        return sum(min(chunk.end, self.num_tokens - 1) - chunk.start for chunk in self.approximate)

    @property
    def budget(self) -> int:
        """Number of tokens to recompute."""
        if self.chunk_budgets is not None:
            return sum(self.chunk_budgets)
        share = self.ratio * self.num_candidates
        return min(self.num_candidates, math.ceil(share - 1e-9 * share))  # 0.07 * 100 is a little over 7

    @property
    def chunk_budgets(self) -> tuple[int, ...] | None:
        """Number of tokens to recompute of every chunk; ``None`` where they share the budget."""
        budgets = tuple(chunk.budget for chunk in self.chunks if chunk.budget is not None)
        return budgets if budgets and len(budgets) == len(self.chunks) else None

    def with_budget(self, budget: int) -> RequestPlan:
        """The same plan with so many tokens to recompute."""
        return replace(self, ratio=budget / max(1, self.num_candidates))

    @property
    def leading_exact(self) -> int:
        """Number of leading tokens whose KV does not depend on any approximate KV."""
        approximate = self.approximate
        return approximate[0].start if approximate else self.num_tokens

    @property
    def computed_exactly(self) -> list[int]:
        """Numbers of the chunks that are computed in place behind nothing but exact KV."""
        exact = self.leading_exact
        return [n for n, c in enumerate(self.chunks) if c.action is Action.PREFILL and c.end <= exact]

    def free_ranges(self) -> list[tuple[int, int]]:
        """Token ranges that are computed in any case: text between chunks that is not stored, and chunks to prefill.

        The last token is always among them: its logits give the first token of the answer.
        """
        ranges: list[tuple[int, int]] = []
        cursor = self.head
        for chunk in self.chunks:
            if chunk.action is Action.PREFILL:
                continue
            ranges.append((cursor, chunk.start))
            cursor = chunk.end
        ranges.append((min(cursor, self.num_tokens - 1), self.num_tokens))
        return [(start, end) for start, end in ranges if start < end]

    def question_range(self) -> tuple[int, int]:
        """The tokens after the last chunk, which stand for the question when tokens are chosen."""
        last = max((chunk.end for chunk in self.chunks), default=0)
        return min(last, self.num_tokens - 1), self.num_tokens


def make_plan(
    num_tokens: int,
    spans: Sequence[tuple[int, int]],
    stored: Sequence[bool],
    exact: Sequence[bool],
    ratio: float,
    cfos: Sequence[float | None] = (),
    head: int = 0,
) -> RequestPlan:
    """Decide what happens to every chunk.

    Args:
        num_tokens: Length of the prompt.
        spans: Token range of every chunk, in order.
        stored: Whether the chunk's KV is stored.
        exact: Whether the KV that is stored, or would be computed for it alone, stands behind the same tokens as here.
        ratio: Share of the approximate chunk tokens to recompute. At 1.0 a missing chunk is computed in place: its KV
            alone would only be thrown away.
        cfos: Share of its own tokens to recompute for every chunk; then there is no common ratio, and a chunk that is
            missing, or needs all of its tokens, is computed in place. Without shares the ratio decides.
        head: Number of leading tokens, before the first chunk, whose KV is stored.
    """
    if cfos and None not in cfos:
        by_cfo = _plan_by_cfo(num_tokens, spans, stored, exact, [cfo for cfo in cfos if cfo is not None])
        return replace(by_cfo, head=head)
    chunks = []
    for (start, end), is_stored, is_exact in zip(spans, stored, exact, strict=True):
        action = Action.REUSE if is_stored else Action.ENCODE if ratio < 1.0 or is_exact else Action.PREFILL
        chunks.append(PlannedChunk(start, end, action, is_exact))
    return RequestPlan(num_tokens, tuple(chunks), ratio, head)


def _plan_by_cfo(
    num_tokens: int,
    spans: Sequence[tuple[int, int]],
    stored: Sequence[bool],
    exact: Sequence[bool],
    cfos: Sequence[float],
) -> RequestPlan:
    chunks = []
    for (start, end), is_stored, is_exact, cfo in zip(spans, stored, exact, cfos, strict=True):
        needed = 0 if is_exact else num_to_recompute(cfo, end - start)
        if not is_stored or needed == end - start:
            chunks.append(PlannedChunk(start, end, Action.PREFILL, is_exact, 0))
        else:
            budget = min(needed, min(end, num_tokens - 1) - start)  # the last token is computed in any case
            chunks.append(PlannedChunk(start, end, Action.REUSE, is_exact, budget))
    plan = RequestPlan(num_tokens, tuple(chunks), 0.0)
    return plan.with_budget(plan.budget)
