"""Layers of transformers' cache that write into our own buffers instead of keeping anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from cachecraft_rag.prompt_kv import PromptKV


class BufferLayer(CacheLayerMixin):
    """One layer of a prompt's buffer: new rows are scattered in place, attention sees everything up to the last.

    Args:
        kv: The prompt's buffer.
        layer_idx: Which layer.
        rows: ``[num_rows]`` int64 positions of the new rows; ``None`` when they are the run from ``start`` to ``end``.
        start: Position of the first new row.
        end: Position behind the last one.
    """

    is_sliding = False

    def __init__(self, kv: PromptKV, layer_idx: int, rows: torch.Tensor | None, start: int, end: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.keys: torch.Tensor = kv.keys[layer_idx]
        self.values: torch.Tensor = kv.values[layer_idx]
        self.kv, self.layer_idx = kv, layer_idx
        self.rows, self.start, self.end = rows, start, end
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        raise AssertionError("the buffer is allocated before the forward pass")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.kv.ready(self.layer_idx)  # the layer before this one has computed while it was loaded
        self.kv.correct(self.layer_idx, key_states[0], value_states[0])
        if self.rows is None:
            self.keys[:, :, self.start : self.end] = key_states
            self.values[:, :, self.start : self.end] = value_states
        else:
            self.keys.index_copy_(2, self.rows, key_states)
            self.values.index_copy_(2, self.rows, value_states)
        return self.keys[:, :, : self.end], self.values[:, :, : self.end]

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.end, 0

    def get_seq_length(self) -> int:
        return self.start

    def get_max_length(self) -> int:
        return self.keys.shape[2]

    get_max_cache_shape = get_max_length  # its name before transformers 5


class BatchLayer(CacheLayerMixin):
    """One layer of several prompts' buffers, each of its own length: everyone's new row goes behind its last.

    Attention reads the buffers themselves (``BatchPass``), because keys of different lengths are no one tensor.

    Args:
        kvs: The buffers, in the order of the batch.
        layer_idx: Which layer.
    """

    is_sliding = False

    def __init__(self, kvs: Sequence[PromptKV], layer_idx: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.kvs, self.layer_idx = kvs, layer_idx
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        raise AssertionError("the buffers are allocated before the forward pass")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for kv, keys, values in zip(self.kvs, key_states, value_states, strict=True):
            kv.keys[self.layer_idx, 0, :, kv.length] = keys[:, 0]
            kv.values[self.layer_idx, 0, :, kv.length] = values[:, 0]
        return key_states, value_states

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.get_seq_length() + 1, 0

    def get_seq_length(self) -> int:
        return max(kv.length for kv in self.kvs)

    def get_max_length(self) -> int:
        return max(kv.capacity for kv in self.kvs)

    get_max_cache_shape = get_max_length


class EndOfForward(Exception):
    """Raised by a capturing layer when the layers above are not needed."""


class CaptureLayer(CacheLayerMixin):
    """Keeps what the model computes for one layer; the last one wanted ends the forward pass.

    Args:
        is_last: Whether this is the last one wanted.
    """

    is_sliding = False

    def __init__(self, is_last: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.is_last = is_last

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        if self.is_last:
            raise EndOfForward
        return key_states, value_states

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return (query_length if isinstance(query_length, int) else query_length.shape[0]), 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length
