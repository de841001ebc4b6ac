"""Buffers of requests that have ended, kept for those that come.

An allocator gives memory of this size back to the operating system, and touching it anew takes time: 9 ms for 50 MiB
where it is still at hand, 80 where a virtual machine has returned it to its host.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

_STEP = 256
"""Capacities are multiples of this, in tokens, so that prompts of about the same length can use the same buffers. What
is never written takes no memory."""
_LARGEST_EXCESS = 2
"""Buffers with more than so many times the room that a prompt needs are left for longer ones."""


class Buffers(NamedTuple):
    """Keys and values of one prompt, ``[num_layers, 1, num_kv_heads, capacity, head_dim]``; new ones hold anything."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def capacity(self) -> int:
        """Tokens that they have room for."""
        return self.keys.shape[3]


class KVPool:
    """Keeps buffers on a CPU; on other devices PyTorch does so itself. Thread-safe.

    There are never more than were in use at the same time: who finds none of the right size takes the place of one.

    Args:
        keys: Shape of the keys of a token, ``(num_layers, num_kv_heads, head_dim)``.
        values: The same for values.
        dtype: Of both.
        device: Where they are.

    Attributes:
        token_bytes: Bytes of keys and values of a token.
    """

    def __init__(
        self, keys: tuple[int, int, int], values: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shapes, self._dtype, self._device = (keys, values), dtype, device
        self._keeps = device.type == "cpu"
        self.token_bytes = sum(layers * heads * dim for layers, heads, dim in self._shapes) * dtype.itemsize
        self._lock = threading.RLock()  # a garbage collection may end a request, which gives buffers back, anywhere
        self._free: list[Buffers] = []  # those that were used last at the end

    def take(self, capacity: int) -> Buffers:
        """Buffers with room for ``capacity`` tokens at least; what is in them is nobody's."""
        with self._lock:
            most = _LARGEST_EXCESS * max(capacity, _STEP)
            fitting = [one for one in self._free if capacity <= one.capacity <= most]
            leaving = min(fitting or self._free[:1], key=lambda one: one.capacity, default=None)
            self._free = [one for one in self._free if one is not leaving]
        if leaving is not None and fitting:
            return leaving
        room = -(-capacity // _STEP) * _STEP if self._keeps else capacity
        return self.make(room)

    def make(self, capacity: int) -> Buffers:
        """New buffers of just this capacity."""
        shapes = [(num_layers, 1, heads, capacity, dim) for num_layers, heads, dim in self._shapes]
        return Buffers(*(torch.empty(shape, dtype=self._dtype, device=self._device) for shape in shapes))

    def give(self, buffers: Buffers) -> None:
        """Hand buffers back that nobody reads or writes any more."""
        if self._keeps:
            with self._lock:
                self._free.append(buffers)

    def shrink(self, num_kept: int) -> None:
        """Let go of all buffers but ``num_kept`` of those that were used last."""
        with self._lock:
            del self._free[: max(0, len(self._free) - num_kept)]
