"""The stored KV of a chunk as that of a piece of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cachecraft_rag.chunk_kv import ChunkKV, LayeredKV
from cachecraft_rag.variants import VariantInfo


class PieceKV:
    """A ``LayeredKV`` over some tokens of another: views, nothing is copied.

    For a piece that begins the chunk this is what would be computed for the piece alone. Any other was computed behind
    the beginning of its chunk, and is as approximate as a chunk that is moved.

    Args:
        whole: KV of the whole chunk.
        start: Number of the first token.
        end: One past the number of the last.

    Attributes:
        whole: As given.
    """

    def __init__(self, whole: LayeredKV, start: int, end: int) -> None:
        if not 0 <= start < end <= whole.num_tokens:
            raise ValueError(f"start, end: {start}, {end} is no part of {whole.num_tokens} tokens")
        self.whole = whole
        self._tokens = slice(start, end)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The piece's token ids."""
        return self.whole.token_ids[self._tokens]

    @property
    def base(self) -> int:
        """Position of the first token when the keys were rotated."""
        return self.whole.base + self._tokens.start

    @property
    def sensitivity(self) -> torch.Tensor | None:
        """``[num_layers, num_tokens]`` float16: how much the values depend on what precedes the whole chunk."""
        sensitivity = self.whole.sensitivity
        return None if sensitivity is None else sensitivity[:, self._tokens]

    @property
    def variant(self) -> VariantInfo | None:
        """Always ``None``: what was recorded is of the whole chunk."""
        return None

    @property
    def inter_attention(self) -> torch.Tensor | None:
        """Always ``None``, as ``variant``."""
        return None

    @property
    def num_tokens(self) -> int:
        """Length of the piece in tokens."""
        return self._tokens.stop - self._tokens.start

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.whole.num_layers

    @property
    def nbytes(self) -> int:
        """Bytes of the whole entry: that is what is held, and read."""
        return self.whole.nbytes

    @property
    def is_lossy(self) -> bool:
        """Whether the entry ever was held in fewer bits."""
        return self.whole.is_lossy

    @property
    def is_read(self) -> bool:
        """Whether every layer is in memory."""
        return self.whole.is_read

    def matches(self, token_ids: Sequence[int]) -> bool:
        """Whether the piece really holds these tokens."""
        return self.token_ids == tuple(token_ids)

    def read(self, layer_idx: int) -> None:
        """Bring a layer of the whole chunk into memory.

        Raises:
            CorruptEntryError: The layer turned out to be damaged.
        """
        self.whole.read(layer_idx)

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each ``[num_kv_heads, num_tokens, head_dim]`` in the model's dtype.

        Raises:
            CorruptEntryError: The layer had to be read and turned out to be damaged.
        """
        keys, values = self.whole.layer(layer_idx)
        return keys[:, self._tokens], values[:, self._tokens]

    def complete(self) -> ChunkKV:
        """All layers of the piece, as views.

        Raises:
            CorruptEntryError: A layer had to be read and turned out to be damaged.
        """
        whole = self.whole.complete()
        tensors = whole.keys[:, :, self._tokens], whole.values[:, :, self._tokens]
        return ChunkKV(*tensors, self.token_ids, self.base, self.sensitivity, whole.is_lossy)
