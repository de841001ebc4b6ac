"""Lets rows look at the most promising blocks of every reused chunk only.

Which blocks get a row's attention is estimated before their keys are read, as in Quest (Tang et al., 2024) and by
practitioners' reports: from a summary of each block. If the keys of a block are normally distributed, its sum of
exponentials is ``n * exp(q.mean + q.covariance.q / 2)``; with the diagonal of the covariance two small products
estimate the attention of all blocks. The best blocks of every chunk are kept for a run of rows together, so their
keys are gathered once for all of these, and everything outside of reused chunks is always looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cachecraft_rag.attention import BlockAttention, QueryBlock, attend

KEY_BLOCK = 32
"""Keys per block."""


@dataclass(eq=False)
class _Narrowing:
    """What of the choice for a run of rows is the same in all layers; ``[num_blocks]`` each.

    Attributes:
        reachable: Blocks that have keys among those of the rows.
        own: Blocks that are kept in any case: those that the rows lie in, and that of the prompt's first token.
        quotas: How many blocks of every chunk are kept, ``[num_chunks, 1]``; those in ``own`` count.
    """

    reachable: torch.Tensor
    own: torch.Tensor
    quotas: torch.Tensor


@dataclass(eq=False)
class SparseKeys:
    """Which keys a forward pass reads.

    Args:
        positions: ``[num_rows]`` int64 on the CPU, positions of the rows, increasing.
        chunks: Token ranges ``[start, end)`` of the chunks that may be looked at in part, in order.
        share: Share of the blocks of every chunk that is kept, above 0; rounded up.
        num_tokens: Length of the prompt.
        device: Where its KV is.
    """

    positions: torch.Tensor
    chunks: Sequence[tuple[int, int]]
    share: float
    num_tokens: int
    device: torch.device
    _narrowings: dict[tuple[tuple[int, int], tuple[int, int]], _Narrowing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = [-(-(end - start) // KEY_BLOCK) for start, end in self.chunks]
        self._num_blocks, self._most = sum(counts), max(counts)
        block_of_key = torch.full((self.num_tokens,), self._num_blocks)  # one more block: all that is always kept
        starts: list[int] = []
        ends: list[int] = []
        slots: list[int] = []
        for chunk, ((start, end), count) in enumerate(zip(self.chunks, counts, strict=True)):
            block_of_key[start:end] = len(starts) + torch.arange(end - start) // KEY_BLOCK
            slots += range(chunk * self._most, chunk * self._most + count)
            starts += range(start, end, KEY_BLOCK)
            ends += [min(first + KEY_BLOCK, end) for first in range(start, end, KEY_BLOCK)]
        self._block_of_key, self._starts, self._ends = block_of_key, torch.tensor(starts), torch.tensor(ends)
        self._on_device = block_of_key.to(self.device)
        self._slots = torch.tensor(slots, device=self.device)
        self._chunk_of_block = torch.tensor(slots) // self._most
        self._kept_per_chunk = torch.tensor([math.ceil(self.share * count - 1e-9) for count in counts])

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        blocks: list[QueryBlock],
        kernel: BlockAttention,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Like ``attention.attend``, over the keys that are kept."""
        summary = self._summarise(key[0])

        def sparse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: QueryBlock) -> torch.Tensor:
            if block.is_causal:
                return kernel(q, k, v, block)  # a beginning that is computed as a whole
            mass = self._mass(q[0], summary, scaling, softcap)
            kept = self._choose(mass, block)[self._on_device[slice(*block.keys)]].nonzero().squeeze(1)
            visible = None if block.visible is None else block.visible.to(self.device)[:, kept]
            narrowed = QueryBlock(block.rows, block.keys, visible)
            return kernel(q, k.index_select(2, kept), v.index_select(2, kept), narrowed)

        return attend(query, key, value, blocks, sparse)

    def _summarise(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean and variance of every block's keys, ``[num_kv_heads, num_blocks, head_dim]``, and their number."""
        heads, num_keys, head_dim = keys.shape
        index = self._on_device[:num_keys]
        sums = torch.zeros(2, heads, self._num_blocks + 1, head_dim, device=keys.device)
        own = keys.float()
        sums[0].index_add_(1, index, own)
        sums[1].index_add_(1, index, own.square())
        counts = torch.bincount(index, minlength=self._num_blocks + 1)[: self._num_blocks]
        mean, square = (sums[:, :, : self._num_blocks] / counts.clamp(min=1)[:, None]).unbind()
        return mean, (square - mean.square()).clamp_(min=0.0), counts

    def _mass(
        self,
        query: torch.Tensor,
        summary: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Estimated attention of the rows to every block, summed over heads and rows, ``[num_blocks]`` float32."""
        mean, variance, counts = summary
        grouped = query.float().reshape(mean.shape[0], -1, query.shape[-1]) * scaling
        scores = grouped @ mean.transpose(1, 2) + 0.5 * (grouped.square() @ variance.transpose(1, 2))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        return (scores + counts.log()).softmax(dim=-1).sum(dim=(0, 1))

    def _choose(self, mass: torch.Tensor, block: QueryBlock) -> torch.Tensor:
        """Whether each block is kept, ``[num_blocks + 1]`` bool; the last one stands for all other text."""
        place = (block.rows, block.keys)
        if place not in self._narrowings:
            self._narrowings[place] = self._narrow(block)
        narrowing = self._narrowings[place]
        mass = mass.masked_fill(~narrowing.reachable, -1.0).masked_fill(narrowing.own, float("inf"))
        by_chunk = mass.new_full((len(self.chunks) * self._most,), -2.0)
        by_chunk[self._slots] = mass
        by_chunk = by_chunk.reshape(len(self.chunks), self._most)
        rank = by_chunk.argsort(dim=1, descending=True).argsort(dim=1)
        kept = (rank < narrowing.quotas).flatten()[self._slots]
        return torch.cat([kept, kept.new_ones(1)])

    def _narrow(self, block: QueryBlock) -> _Narrowing:
        places = self.positions[slice(*block.rows)]
        own = torch.zeros(self._num_blocks + 1, dtype=torch.bool)
        own[self._block_of_key[places]] = True
        own[self._block_of_key[0]] = True  # where models put the attention that they have no use for
        own = own[: self._num_blocks]
        held = torch.zeros(len(self.chunks), dtype=torch.long).index_add_(0, self._chunk_of_block, own.long())
        quotas = torch.maximum(self._kept_per_chunk, held)[:, None]
        reachable = (self._starts < block.keys[1]) & (self._ends > block.keys[0])
        return _Narrowing(reachable.to(self.device), own.to(self.device), quotas.to(self.device))
