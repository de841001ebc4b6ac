"""The keys and values of one whole prompt, allocated once for prompt and answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Correction = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Changes the KV of a layer in place, given its number, keys, values, and the keys and values of the rows computed now;
shapes ``[num_kv_heads, n, head_dim]``."""


class PromptKV:
    """One buffer per request: chunks are placed into it, computed rows are scattered into it, decode appends to it.

    Args:
        keys: ``[num_layers, 1, num_kv_heads, capacity, head_dim]``, model dtype. They may hold anything: a position is
            written before it is read.
        values: The same for values (their head_dim may differ).
        give_back: Takes them back when the request has ended; ``None`` where nobody wants them.

    Attributes:
        keys: As given.
        values: As given.
        length: Number of leading positions that hold the KV of tokens.
        fill_s: Seconds spent on putting stored KV in place, waiting for it included.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, give_back: Callable[[], None] | None = None) -> None:
        self.keys, self.values, self._give_back = keys, values, give_back
        self.length = 0
        self.fill_s = 0.0
        self._fill: Callable[[int], None] | None = None
        self._correction: Correction | None = None
        self._num_filled = keys.shape[0]

    def release(self) -> None:
        """Give the memory back: the request has ended, and nothing may be read or written any more."""
        give_back, self._give_back = self._give_back, None
        self.keys, self.values = self.keys.new_empty(0), self.values.new_empty(0)
        self._fill = None
        if give_back is not None:
            give_back()

    @property
    def capacity(self) -> int:
        """Largest number of positions."""
        return self.keys.shape[3]

    def fill_by(self, fill: Callable[[int], None]) -> None:
        """Have stored KV put in place by ``fill(layer_idx)``, called once per layer, in order, when it is needed."""
        self._fill, self._num_filled = fill, 0

    def ready(self, layer_idx: int) -> None:
        """Make sure that stored KV of the layers up to this one is in place.

        Raises:
            CorruptEntryError: The stored KV turned out to be damaged.
        """
        if self._num_filled > layer_idx or self._fill is None:
            return
        started = time.perf_counter()
        try:
            while self._num_filled <= layer_idx:
                self._fill(self._num_filled)
                self._num_filled += 1
        finally:
            self.fill_s += time.perf_counter() - started
        if self._num_filled == self.keys.shape[0]:
            self._fill = None  # what it holds is of no more use

    @contextmanager
    def corrected_by(self, correction: Correction | None) -> Iterator[None]:
        """Have stored KV corrected in every layer before new rows are written over it, while the block lasts."""
        self._correction = correction
        try:
            yield
        finally:
            self._correction = None

    def correct(self, layer_idx: int, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        """Correct the stored KV of a layer by its new rows, ``[num_kv_heads, num_rows, head_dim]`` each."""
        if self._correction is not None:
            self._correction(layer_idx, self.keys[layer_idx, 0], self.values[layer_idx, 0], new_keys, new_values)

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, ``[num_kv_heads, capacity, head_dim]`` each, stored KV in place."""
        self.ready(layer_idx)
        return self.keys[layer_idx, 0], self.values[layer_idx, 0]

    def place(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the KV of a run of tokens to positions ``start...``.

        Args:
            start: Position of the first token.
            keys: ``[num_layers, num_kv_heads, num_tokens, head_dim]``, already rotated for these positions.
            values: The same shape.
        """
        end = start + keys.shape[2]
        self.keys[:, 0, :, start:end].copy_(keys, non_blocking=True)
        self.values[:, 0, :, start:end].copy_(values, non_blocking=True)

    def slice(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values at positions ``[start, end)``, each ``[num_layers, num_kv_heads, n, dim]``."""
        self.ready(self.keys.shape[0] - 1)
        return self.keys[:, 0, :, start:end].clone(), self.values[:, 0, :, start:end].clone()
