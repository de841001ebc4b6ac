"""Attention of selected queries over the KV of the whole prompt, skipping what causality masks.

A plain boolean mask makes the kernel compute the whole rectangle of queries times keys. The queries are sorted by
position, so a block of neighbours needs only the keys up to its own last position: the rest is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

QUERY_BLOCK = 128
"""Queries per block: smaller wastes less of the rectangle, larger has fewer kernel calls."""

_FEW_ROWS = 64
"""Fewer queries than these leave a CPU kernel's blocks half empty, unless the heads of a group are taken together."""

BlockAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "QueryBlock"], torch.Tensor]


@dataclass(eq=False)
class QueryBlock:
    """A run of query rows and the keys that they may see.

    Attributes:
        rows: Range of query rows.
        keys: Range of key positions read by these rows.
        visible: ``[num_rows, num_keys]`` bool, or ``None`` when every row sees every key of the range.
        is_causal: Row i sees exactly the keys up to i (rows and keys are the same positions).
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    visible: torch.Tensor | None
    is_causal: bool = False
    _bias: dict[tuple[torch.dtype, int], torch.Tensor] = field(default_factory=dict)

    def bias(self, dtype: torch.dtype, device: torch.device, repeats: int = 1) -> torch.Tensor | None:
        """Additive mask in the dtype of the queries, made once for all layers.

        Returns:
            ``[1, 1, repeats * num_rows, num_keys]``, the rows once for every head that is packed with them.
        """
        if self.visible is None:
            return None
        if (dtype, repeats) not in self._bias:
            bias = torch.zeros(self.visible.shape, dtype=dtype, device=device)
            bias.masked_fill_(~self.visible.to(device), torch.finfo(dtype).min)
            self._bias[dtype, repeats] = bias.repeat(repeats, 1)[None, None]
        return self._bias[dtype, repeats]


def plan_blocks(positions: torch.Tensor, window: int | None, allow_causal: bool = True) -> list[QueryBlock]:
    """Cut sorted query positions into blocks.

    Args:
        positions: ``[num_rows]`` int64 on the CPU, strictly increasing.
        window: Sliding window of the layer in tokens, own position included; ``None`` for full attention.
        allow_causal: Whether a leading run from position 0 may use the kernel's own causal mode.

    Returns:
        Blocks that cover all rows in order.
    """
    num_rows = positions.numel()
    blocks: list[QueryBlock] = []
    row = 0
    if allow_causal and num_rows > 1 and int(positions[0]) == 0:
        gaps = (positions != torch.arange(num_rows)).nonzero()
        run = int(gaps[0]) if gaps.numel() else num_rows
        run = run if window is None else min(run, window)
        if run > 1:
            blocks.append(QueryBlock((0, run), (0, run), visible=None, is_causal=True))
            row = run
    while row < num_rows:
        end = min(num_rows, row + QUERY_BLOCK)
        first_key = 0 if window is None else max(0, int(positions[row]) - window + 1)
        last_key = int(positions[end - 1]) + 1
        visible = None
        if end - row > 1:
            visible = visible_keys(positions[row:end], torch.arange(first_key, last_key), window)
        blocks.append(QueryBlock((row, end), (first_key, last_key), visible))
        row = end
    return blocks


def visible_keys(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which key positions each query position sees, ``[num_queries, num_keys]`` bool."""
    visible = keys[None, :] <= queries[:, None]
    if window is not None:
        visible &= keys[None, :] > queries[:, None] - window
    return visible


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: list[QueryBlock], kernel: BlockAttention
) -> torch.Tensor:
    """Attention of all blocks.

    Args:
        query: ``[1, num_heads, num_rows, head_dim]``.
        key: ``[1, num_kv_heads, num_keys, head_dim]``, positions ``0..num_keys``.
        value: The same for values.
        blocks: From ``plan_blocks``.
        kernel: Computes one block and returns ``[1, num_rows_of_block, num_heads, value_dim]``.

    Returns:
        ``[1, num_rows, num_heads, value_dim]``.
    """
    outputs = []
    for block in blocks:
        (first, last), (first_key, last_key) = block.rows, block.keys
        keys, values = key[:, :, first_key:last_key], value[:, :, first_key:last_key]
        outputs.append(kernel(query[:, :, first:last], keys, values, block))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def sdpa_block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: QueryBlock, scaling: float | None
) -> torch.Tensor:
    """One block with PyTorch's scaled dot product attention; shapes as in ``attend``."""
    num_heads, num_rows = query.shape[1:3]
    num_kv_heads = key.shape[1]
    groups = num_heads // num_kv_heads
    if groups > 1 and not block.is_causal and num_rows < (_FEW_ROWS if query.device.type == "cpu" else 2):
        # The heads of a group become rows of one query: nothing of the keys is copied for them.
        packed = query.reshape(1, num_kv_heads, groups * num_rows, query.shape[-1])
        bias = block.bias(query.dtype, query.device, repeats=groups)
        output = F.scaled_dot_product_attention(packed, key, value, attn_mask=bias, scale=scaling)
        return output.reshape(1, num_heads, num_rows, -1).transpose(1, 2)
    bias = block.bias(query.dtype, query.device)
    if groups > 1 and query.device.type != "cpu" and bias is not None:
        # With a mask CUDA has no fast kernel for grouped heads: repeating the keys is cheaper than the slow one.
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        groups = 1
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, is_causal=block.is_causal, scale=scaling, enable_gqa=groups > 1
    )
    return output.transpose(1, 2)


def attention_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    window: int | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """How much attention some queries pay to every key, summed over heads and queries.

    Args:
        query: ``[1, num_heads, num_rows, head_dim]``.
        key: ``[1, num_kv_heads, num_keys, head_dim]``, positions ``0..num_keys``.
        positions: ``[num_rows]`` int64 positions of the queries.
        window: Sliding window of the layer.
        scaling: Factor of the scores.
        softcap: Bound of the scores (Gemma 2), applied as ``softcap * tanh(score / softcap)``.

    Returns:
        ``[num_keys]`` float32; sums to ``num_heads * num_rows``.
    """
    mass = torch.zeros(key.shape[2], device=query.device)
    for weights in _weights(query, key, positions, window, scaling, softcap):
        mass += _summed(weights)
    return mass


def attend_with_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    window: int | None,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of some queries, and how much they pay to every key: the weights are made once for both.

    They are rounded to the dtype of the queries, which ``attend`` does not do.

    Args:
        query: As for ``attention_mass``, like all others.
        key: The keys.
        value: ``[1, num_kv_heads, num_keys, value_dim]``.
        positions: Positions of the queries.
        window: Sliding window of the layer.
        scaling: Factor of the scores.

    Returns:
        Output ``[1, num_rows, num_heads, value_dim]``, and ``[num_keys]`` float32.
    """
    mass, outputs = torch.zeros(key.shape[2], device=query.device), []
    for weights in _weights(query, key, positions, window, scaling, None):
        mass += _summed(weights)
        output = torch.matmul(weights.flatten(1, 2), value[0])
        outputs.append(output.reshape(query.shape[1], -1, value.shape[-1]).transpose(0, 1))
    return torch.cat(outputs)[None], mass


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    window: int | None,
    scaling: float,
    softcap: float | None,
) -> Iterator[torch.Tensor]:
    """Softmax of a block of rows after the other, ``[num_kv_heads, groups, num_rows, num_keys]``, dtype of the queries.

    Scores of all rows at once may take gigabytes.
    """
    num_kv_heads, num_keys, head_dim = key.shape[1:]
    for rows, places in zip(query[0].split(QUERY_BLOCK, dim=1), positions.split(QUERY_BLOCK), strict=True):
        grouped = (rows * scaling).reshape(num_kv_heads, -1, head_dim)  # first: a product of float16 may overflow
        scores = torch.matmul(grouped, key[0].transpose(-1, -2))
        if softcap is not None:
            scores = softcap * torch.tanh(scores.float() / softcap)
        scores = scores.reshape(num_kv_heads, -1, places.numel(), num_keys)
        first = int(places[0]) if window is None else 0  # every row sees all keys before the first one
        keys = torch.arange(first, num_keys, device=query.device)
        scores[..., first:].masked_fill_(~visible_keys(places.to(query.device), keys, window), float("-inf"))
        yield scores.softmax(dim=-1)


def _summed(weights: torch.Tensor) -> torch.Tensor:
    """``[num_kv_heads, groups, num_rows, num_keys]`` summed to ``[num_keys]`` float32.

    Sums of a head keep the dtype: a sum in another one copies everything first.
    """
    return weights.flatten(1, 2).sum(dim=1).sum(dim=0, dtype=torch.float32)
