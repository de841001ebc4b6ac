"""A stored entry that is read layer by layer, each layer once, by whoever needs it first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.errors import CorruptEntryError, StoreUnavailableError
from cachecraft_rag.store.precision import PackedKV
from cachecraft_rag.store.shard import Shard
from cachecraft_rag.variants import VariantInfo


class LazyKV:
    """A ``LayeredKV`` over stored shards. Thread-safe; requests may share one.

    Reading a layer and decoding it are apart: ``read`` does what waits for the medium or needs one core, in any thread
    beside a forward pass, and ``layer`` the arithmetic. Once a block turned out to be damaged, or can't be read, every
    call raises, also for layers that were read before: nobody should go on with such an entry.

    Files or bytes are held until all layers are read, or until the object is closed or dropped.

    Args:
        shards: The shards of one entry, in order, made to fit by ``EntryCodec.open``.
        device: Where layers are decoded; ``None`` is the CPU.
        on_corrupt: Called once, before the first error is raised.
        on_read: Called once, with the stored bytes and the seconds spent reading, by the thread that read the last one.

    Attributes:
        token_ids: The chunk's token ids.
        base: Position of the first token when the keys were rotated.
        is_lossy: Whether its numbers are no longer those computed.
        sensitivity: ``[num_layers, num_tokens]``; ``None`` when it wasn't measured.
        variant: What it was made behind; ``None`` when that wasn't recorded.
        inter_attention: ``[num_tokens]``; recorded together with ``variant``.
        num_layers: Number of layers.
        nbytes: Bytes of the entry as it is stored.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        device: torch.device | None = None,
        on_corrupt: Callable[[], None] | None = None,
        on_read: Callable[[int, float], None] | None = None,
    ) -> None:
        self.token_ids: tuple[int, ...] = tuple(token for shard in shards for token in shard.header.token_ids)
        self.base: int = shards[0].header.base
        self.num_layers: int = shards[0].header.num_layers
        self.is_lossy: bool = shards[0].shape.is_lossy
        self.nbytes: int = sum(shard.reader.size for shard in shards)
        measured = [shard.shape.sensitivity for shard in shards if shard.shape.sensitivity is not None]
        self.sensitivity: torch.Tensor | None = torch.cat(measured, dim=1) if measured else None
        self.variant: VariantInfo | None = shards[0].shape.variant
        recorded = [shard.shape.inter_attention for shard in shards if shard.shape.inter_attention is not None]
        self.inter_attention: torch.Tensor | None = torch.cat(recorded) if recorded else None
        self._shards = tuple(shards)
        self._device = device
        self._on_corrupt, self._on_read = on_corrupt, on_read
        self._layers: list[list[PackedKV] | None] = [None] * self.num_layers
        self._is_read = [False] * self.num_layers
        self._reading = [threading.Lock() for _ in range(self.num_layers)]
        self._counting = threading.Lock()  # guards the next two
        self._num_read = 0
        self._read_s = 0.0
        self._damage: str | None = None
        self._reporting = threading.RLock()  # nobody raises while damage is still being reported
        self._is_closed = False
        self._completing = threading.Lock()
        self._kv: ChunkKV | None = None

    @property
    def num_tokens(self) -> int:
        """Length of the chunk in tokens."""
        return len(self.token_ids)

    @property
    def is_read(self) -> bool:
        """Whether all layers were read."""
        return self._num_read == self.num_layers

    def matches(self, token_ids: Sequence[int]) -> bool:
        """Whether this entry really holds these tokens."""
        return self.token_ids == tuple(token_ids)

    def read(self, layer_idx: int) -> None:
        """Read and verify a layer, unless that was done; returns when it is there.

        Raises:
            CorruptEntryError: Any layer of the entry is damaged or can't be read.
            StoreUnavailableError: Closed before this layer was read.
            ValueError: There is no such layer.
        """
        if not 0 <= layer_idx < self.num_layers:
            raise ValueError(f"layer_idx: {layer_idx} is not in 0 to {self.num_layers - 1}")
        is_last = False
        with self._reading[layer_idx]:
            if not self._is_read[layer_idx] and self._damage is None:
                is_last = self._read(layer_idx)
        self._raise_damage()
        if is_last:
            self._release()
            if self._on_read is not None:
                self._on_read(self.nbytes, self._read_s)

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each ``[num_kv_heads, num_tokens, head_dim]``, read if that wasn't done.

        Raises:
            CorruptEntryError, StoreUnavailableError, ValueError: As ``read``.
        """
        self.read(layer_idx)
        packed = self._layers[layer_idx]
        if packed is None:  # handed over to the complete entry
            assert self._kv is not None
            return self._kv.layer(layer_idx)
        return self._decoded(packed)

    def complete(self) -> ChunkKV:
        """All layers, those read that weren't; the same object every time.

        Raises:
            CorruptEntryError, StoreUnavailableError: As ``read``.
        """
        with self._completing:
            if self._kv is None:
                for layer_idx in range(self.num_layers):
                    self.read(layer_idx)
                self._kv = self._joined()
                self._layers = [None] * self.num_layers
            return self._kv

    def close(self) -> None:
        """Let go of files and bytes. Layers that were read stay; others can't be read any more."""
        with ExitStack() as reads:
            for lock in self._reading:  # reads under way end first: their descriptors must not become other files'
                reads.enter_context(lock)
            self._is_closed = True
            self._release()

    def _read(self, layer_idx: int) -> bool:
        """Read a layer with its lock held, or note the damage; whether it was the last."""
        if self._is_closed:
            raise StoreUnavailableError(f"closed before layer {layer_idx} was read")
        started = time.perf_counter()
        try:
            self._layers[layer_idx] = [shard.read(layer_idx) for shard in self._shards]
        except (CorruptEntryError, OSError) as error:
            self._damage = f"layer {layer_idx}: {error}"
            return False
        self._is_read[layer_idx] = True
        with self._counting:
            self._read_s += time.perf_counter() - started
            self._num_read += 1
            return self._num_read == self.num_layers

    def _raise_damage(self) -> None:
        if self._damage is None:
            return
        with self._reporting:
            report, self._on_corrupt = self._on_corrupt, None
            if report is not None:
                report()
        raise CorruptEntryError(self._damage)

    def _decoded(self, packed: Sequence[PackedKV]) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values from its slice of each shard."""
        parts = packed if self._device is None else [part.to(self._device) for part in packed]
        if len(parts) == 1:
            return parts[0].layer(0)
        keys, values = zip(*(part.layer(0) for part in parts), strict=True)
        return torch.cat(keys, dim=1), torch.cat(values, dim=1)

    def _joined(self) -> ChunkKV:
        shape = self._shards[0].shape
        heads = shape.parts["keys"].shape[1]
        keys, values = (
            torch.empty(self.num_layers, heads, self.num_tokens, dim, dtype=shape.dtype, device=self._device)
            for dim in (shape.key_dim, shape.value_dim)
        )
        for layer_idx, packed in enumerate(self._layers):
            assert packed is not None
            keys[layer_idx], values[layer_idx] = self._decoded(packed)
        recorded = self.sensitivity, self.is_lossy, self.variant, self.inter_attention
        return ChunkKV(keys, values, self.token_ids, self.base, *recorded)

    def _release(self) -> None:
        for shard in self._shards:
            shard.reader.close()
