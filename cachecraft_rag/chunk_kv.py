"""The keys and values of one chunk, as they are stored, and what else may stand in for them while they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from cachecraft_rag.variants import VariantInfo


class LayeredKV(Protocol):
    """KV of one chunk that is given out layer by layer, so that one layer can be read while the one before is used.

    ``ChunkKV`` has all of it in the model's dtype; ``PackedKV`` holds fewer bits and unpacks a layer when asked;
    ``LazyKV`` still has layers to read. Tensors are for reading only.
    """

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The chunk's token ids; compared after every hash hit."""

    @property
    def base(self) -> int:
        """Position of the first token when the keys were rotated."""

    @property
    def sensitivity(self) -> torch.Tensor | None:
        """``[num_layers, num_tokens]`` float16, on the CPU or with the keys; ``None`` until measured."""

    @property
    def variant(self) -> VariantInfo | None:
        """What it was made behind and paid attention to; ``None`` when that was not recorded."""

    @property
    def inter_attention(self) -> torch.Tensor | None:
        """``[num_tokens]`` float16 on the CPU, recorded together with ``variant``."""

    @property
    def num_tokens(self) -> int:
        """Length of the chunk in tokens."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""

    @property
    def nbytes(self) -> int:
        """Bytes of the entry as it is held."""

    @property
    def is_lossy(self) -> bool:
        """Whether it ever was held in fewer bits, so that its numbers are no longer those computed."""

    @property
    def is_read(self) -> bool:
        """Whether every layer is in memory."""

    def matches(self, token_ids: Sequence[int]) -> bool:
        """Whether this entry really holds these tokens."""

    def read(self, layer_idx: int) -> None:
        """Bring a layer into memory, so that ``layer`` need not wait for it; meant for another thread.

        Raises:
            CorruptEntryError: The layer turned out to be damaged.
        """

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each ``[num_kv_heads, num_tokens, head_dim]`` in the model's dtype.

        Raises:
            CorruptEntryError: The layer had to be read and turned out to be damaged.
        """

    def complete(self) -> ChunkKV:
        """All layers.

        Raises:
            CorruptEntryError: A layer had to be read and turned out to be damaged.
        """


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
        is_lossy: Whether it ever was held in fewer bits.
        variant: What it was made behind, recorded when it was computed in the prompt it appeared in.
        inter_attention: Attention that each token paid to the chunks before its own, summed over heads, mean over
            layers, ``[num_tokens]`` float16; recorded together with ``variant``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    token_ids: tuple[int, ...]
    base: int
    sensitivity: torch.Tensor | None = None
    is_lossy: bool = False
    variant: VariantInfo | None = None
    inter_attention: torch.Tensor | None = None

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
    def num_layers(self) -> int:
        """Number of layers."""
        return self.keys.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, 4 per token id, and what was recorded."""
        tensors = (self.keys, self.values, self.sensitivity, self.inter_attention)
        recorded = 0 if self.variant is None else self.variant.nbytes
        return sum(tensor.nbytes for tensor in tensors if tensor is not None) + 4 * self.num_tokens + recorded

    def matches(self, token_ids: Sequence[int]) -> bool:
        """Whether this entry really holds these tokens: a hash collision must never serve foreign KV."""
        return self.token_ids == tuple(token_ids)

    @property
    def is_read(self) -> bool:
        """Always."""
        return True

    def read(self, layer_idx: int) -> None:
        """Nothing to do: every layer is in memory."""
        return

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each ``[num_kv_heads, num_tokens, head_dim]``: views."""
        return self.keys[layer_idx], self.values[layer_idx]

    def complete(self) -> ChunkKV:
        """The entry itself: it has all layers."""
        return self

    def with_sensitivity(self, sensitivity: torch.Tensor) -> ChunkKV:
        """The same KV with its static sensitivity, ``[num_layers, num_tokens]``."""
        return replace(self, sensitivity=sensitivity)

    def to(self, device: torch.device) -> ChunkKV:
        """The same entry with its keys and values on a device; itself when they are there already."""
        if self.keys.device == device:
            return self
        return replace(self, keys=self.keys.to(device), values=self.values.to(device))
