"""The keys and values of one chunk, as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, eq=False)
class ChunkKV:
    """KV of one chunk, computed behind some context.

    Attributes:
        keys: Rotated keys, ``[num_layers, num_kv_heads, num_tokens, head_dim]``, model dtype.
        values: Values, the same shape and dtype.
        token_ids: The chunk's token ids; compared after every hash hit.
        base: Position of the first token when the keys were rotated.
        sensitivity: How much each token's values depend on what precedes the chunk,
            ``[num_layers, num_tokens]`` float16; ``None`` until measured.
    """

    keys: torch.Tensor
    values: torch.Tensor
    token_ids: tuple[int, ...]
    base: int
    sensitivity: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.keys.shape[:3] != self.values.shape[:3] or self.keys.shape[2] != len(self.token_ids):
            raise ValueError(
                f"keys {tuple(self.keys.shape)}, values {tuple(self.values.shape)} and {len(self.token_ids)} token_ids "
                "must agree in num_layers, num_kv_heads and num_tokens"
            )

    @property
    def num_tokens(self) -> int:
        """Length of the chunk in tokens."""
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors plus 4 per token id."""
        tensors = [self.keys, self.values] + ([] if self.sensitivity is None else [self.sensitivity])
        return sum(tensor.nbytes for tensor in tensors) + 4 * self.num_tokens

    def matches(self, token_ids: Sequence[int]) -> bool:
        """Whether this entry really holds these tokens: a hash collision must never serve foreign KV."""
        return self.token_ids == tuple(token_ids)

    def with_sensitivity(self, sensitivity: torch.Tensor) -> ChunkKV:
        """The same KV with its static sensitivity, ``[num_layers, num_tokens]``."""
        return replace(self, sensitivity=sensitivity)

    def to(self, device: torch.device) -> ChunkKV:
        """The same entry with its keys and values on a device; itself when they are there already."""
        if self.keys.device == device:
            return self
        return replace(self, keys=self.keys.to(device), values=self.values.to(device))
