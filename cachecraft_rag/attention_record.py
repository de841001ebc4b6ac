"""How much attention chunks pay to each other and to themselves, recorded while their KV is made.

The weights of one layer at 4k tokens would fill gigabytes; only their sums per pair of chunks are kept, and they are
computed block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from cachecraft_rag.attention import QUERY_BLOCK, visible_keys
from cachecraft_rag.variants import Prefix, VariantInfo

AttentionObserver = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int | None, float, float | None], None]
"""Called in every layer with query, key, positions of the queries, window, scaling and softcap: see
``chunk_attention``, which has them too."""

_SCORES_AT_ONCE = 2**23
"""Most float32 scores in memory at a time (32 MiB), as far as one group of heads allows."""


class ChunkAttention(NamedTuple):
    """Attention of one layer, summed over heads; float32, on the device of the keys.

    Attributes:
        inter: ``[num_chunks, num_chunks]``; row i, column j < i: paid by chunk i to chunk j (Eq. 3 of Cache-Craft).
            Zero elsewhere.
        intra: ``[num_chunks]``: paid inside the chunk, by later to earlier tokens; a token's attention to itself is
            not counted (Eq. 4).
        per_token: ``[num_rows]``: paid by each row to all chunks before its own; zero for rows outside of chunks.
    """

    inter: torch.Tensor
    intra: torch.Tensor
    per_token: torch.Tensor


class ChunkRecorder:
    """Observes the layers of a forward pass, and records what some chunks pay attention to.

    Args:
        bounds: Token ranges ``[start, end)`` of all chunks of the prompt, in order.
        wanted: Numbers of the chunks to record, all of whose tokens the pass computes.
    """

    def __init__(self, bounds: Sequence[tuple[int, int]], wanted: Sequence[int]) -> None:
        self._bounds, self._wanted = tuple(bounds), torch.tensor(wanted, dtype=torch.long)
        self._rows: torch.Tensor | None = None
        self._positions = torch.empty(0, dtype=torch.long)
        self._layers: list[ChunkAttention] = []

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        positions: torch.Tensor,
        window: int | None,
        scaling: float,
        softcap: float | None,
    ) -> None:
        """Record a layer; an ``AttentionObserver``."""
        if self._rows is None:
            rows = torch.isin(_chunk_of_row(positions, self._bounds), self._wanted).nonzero().squeeze(1)
            self._rows, self._positions = rows.to(query.device), positions[rows]
        rows = query[:, :, self._rows]
        self._layers.append(chunk_attention(rows, key, self._positions, self._bounds, scaling, window, softcap))

    def variant(self, chunk: int, prefix: Prefix) -> tuple[VariantInfo, torch.Tensor]:
        """What was recorded of a chunk that was computed behind nothing but exact KV.

        Args:
            chunk: Its number, one of those wanted.
            prefix: What stood before it.

        Returns:
            The figures, and the attention of each of its tokens to the chunks before: summed over heads, mean over
            layers, ``[num_tokens]`` float16 on the CPU.
        """
        start, end = self._bounds[chunk]
        inside = (self._positions >= start) & (self._positions < end)
        lengths = [last - first for first, last in self._bounds[:chunk]]
        inter = torch.stack([layer.inter[chunk, :chunk] for layer in self._layers]).tolist()
        intra = torch.stack([layer.intra[chunk] for layer in self._layers]).tolist()
        info = VariantInfo.recorded(prefix, lengths, inter, intra, end - start, is_exact=True)
        per_token = torch.stack([layer.per_token for layer in self._layers]).mean(dim=0).cpu()
        return info, per_token[inside].to(torch.float16)


def chunk_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    bounds: Sequence[tuple[int, int]],
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> ChunkAttention:
    """Attention between the chunks of a prompt, and inside them, in one layer.

    Only the given rows are summed: the figures of a chunk are complete when all of its tokens are among the rows, and
    evenly spaced rows keep the ratios that the formulas need at a fraction of the cost. Text outside of chunks takes
    its part of the softmax and is counted nowhere.

    Args:
        query: ``[1, num_heads, num_rows, head_dim]``.
        key: ``[1, num_kv_heads, num_keys, head_dim]``, positions ``0..num_keys``, rotated like the queries.
        positions: ``[num_rows]`` int64 on the CPU, strictly increasing.
        bounds: Token ranges ``[start, end)`` of the chunks, in order, without overlap.
        scaling: Factor of the scores.
        window: Sliding window of the layer in tokens, own position included; ``None`` for full attention.
        softcap: Bound of the scores (Gemma 2), applied as ``softcap * tanh(score / softcap)``.

    Raises:
        ValueError: ``bounds`` are not in order.
    """
    device, num_chunks = key.device, len(bounds)
    chunk_of_row = _chunk_of_row(positions, bounds)
    inside = (chunk_of_row >= 0).nonzero().squeeze(1)
    paid_to = torch.zeros(positions.numel(), num_chunks, device=device)
    membership = torch.zeros(int(positions[-1]) + 1 if positions.numel() else 0, num_chunks, device=device)
    for chunk, (start, end) in enumerate(bounds):
        membership[start:end, chunk] = 1.0
    for rows in inside.split(QUERY_BLOCK) if inside.numel() else ():
        first = 0 if window is None else max(0, int(positions[rows[0]]) - window + 1)
        last = int(positions[rows[-1]]) + 1
        block, places = rows.to(device), positions[rows].to(device)
        weights = _weights(query[0, :, block], key[0, :, first:last], places, first, scaling, window, softcap)
        weights[torch.arange(len(rows), device=device), places - first] = 0.0
        paid_to[block] = weights @ membership[first:last]

    own = chunk_of_row[inside].to(device)
    paid_to = paid_to[inside.to(device)]
    totals = torch.zeros(num_chunks, num_chunks, device=device).index_add_(0, own, paid_to)
    per_token = torch.zeros(positions.numel(), device=device)
    before_own = torch.arange(num_chunks, device=device)[None, :] < own[:, None]
    per_token[inside.to(device)] = (paid_to * before_own).sum(dim=1)
    return ChunkAttention(totals.tril(-1), totals.diagonal().clone(), per_token)


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    first_key: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Softmax of some rows summed over heads, ``[num_rows, num_keys]`` float32; a few groups of heads at a time."""
    num_kv_heads, num_keys, head_dim = key.shape
    num_rows = query.shape[1]
    hidden = ~visible_keys(positions, torch.arange(first_key, first_key + num_keys, device=key.device), window)
    grouped = (query * scaling).reshape(num_kv_heads, -1, head_dim)  # first: a product of float16 may overflow
    groups_at_once = max(1, _SCORES_AT_ONCE // (grouped.shape[1] * num_keys))
    total = torch.zeros(num_rows, num_keys, device=key.device)
    for at in range(0, num_kv_heads, groups_at_once):
        groups = slice(at, at + groups_at_once)
        scores = torch.matmul(grouped[groups], key[groups].transpose(-1, -2)).float()
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        scores = scores.reshape(-1, num_rows, num_keys).masked_fill_(hidden, float("-inf"))
        total += scores.softmax(dim=-1).sum(dim=0)
    return total


def _chunk_of_row(positions: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Number of the chunk that every row lies in, ``[num_rows]`` int64 on the CPU; -1 outside of chunks."""
    chunk_of_row = torch.full((positions.numel(),), -1, dtype=torch.long)
    cursor = 0
    for chunk, (start, end) in enumerate(bounds):
        if not cursor <= start < end:
            raise ValueError(f"bounds: ({start}, {end}) is empty or starts before {cursor}; give ranges in order")
        chunk_of_row[(positions >= start) & (positions < end)] = chunk
        cursor = end
    return chunk_of_row
