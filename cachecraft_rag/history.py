"""What earlier answers looked at: the attention that their tokens paid to the tokens of chunks."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from cachecraft_rag.attention import attention_mass

DECAY = 0.8
"""What an answer still counts once another one has read the same chunk."""

MAX_BYTES = 64 * 2**20
"""Room for the history of 16 million tokens."""

ChunkName = tuple[str, str]
"""Namespace and ``ChunkKey.chunk``."""


class _Entry(NamedTuple):
    """Weighted mean of the shares of some answers.

    Attributes:
        shares: ``[num_tokens]`` float32; replaced and never changed, because others may read it.
        weight: Sum of the weights; the latest answer has 1.
    """

    shares: torch.Tensor
    weight: float


class AnswerHistory:
    """Keeps how the attention of earlier answers was spread over chunks, the latest counting most. Thread-safe.

    The chunks that were asked for or added least recently are forgotten when there is no more room.

    Args:
        max_bytes: Room for the figures.

    Attributes:
        nbytes: Bytes of the figures that are kept.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.nbytes = 0
        self._max_bytes = max_bytes
        self._entries: OrderedDict[ChunkName, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, namespace: str, chunk: str, num_tokens: int) -> torch.Tensor | None:
        """The share of an answer's attention to chunks that each token of a chunk got.

        Args:
            namespace: Whose chunk.
            chunk: ``ChunkKey.chunk``.
            num_tokens: Its length; a record of another length belongs to another chunk.

        Returns:
            ``[num_tokens]`` float32 on the CPU, for reading only; ``None`` when no answer has read the chunk.
        """
        with self._lock:
            entry = self._entries.get((namespace, chunk))
            if entry is None or entry.shares.numel() != num_tokens:
                return None
            self._entries.move_to_end((namespace, chunk))
            return entry.shares

    def add(self, namespace: str, chunk: str, shares: torch.Tensor) -> None:
        """Add an answer that has read a chunk; what was there before counts ``DECAY`` of what it did.

        Args:
            namespace: Whose chunk.
            chunk: ``ChunkKey.chunk``.
            shares: ``[num_tokens]``, as in ``get``.
        """
        name, shares = (namespace, chunk), shares.detach().to("cpu", torch.float32)
        with self._lock:
            old = self._entries.pop(name, None)
            weight = 1.0
            if old is not None:
                self.nbytes -= old.shares.nbytes
                if old.shares.shape == shares.shape:
                    weight += DECAY * old.weight
                    shares = torch.lerp(old.shares, shares, 1.0 / weight)
            self._entries[name] = _Entry(shares, weight)
            self.nbytes += shares.nbytes
            while self.nbytes > self._max_bytes:
                self._drop(next(iter(self._entries)))

    def forget(self, namespace: str, chunks: Iterable[str]) -> None:
        """Drop what is known of some chunks (``ChunkKey.chunk``) of a namespace."""
        with self._lock:
            for chunk in chunks:
                self._drop((namespace, chunk))

    def clear(self, namespace: str) -> None:
        """Drop what is known of all chunks of a namespace."""
        with self._lock:
            for name in [name for name in self._entries if name[0] == namespace]:
                self._drop(name)

    def _drop(self, name: ChunkName) -> None:
        entry = self._entries.pop(name, None)
        self.nbytes -= 0 if entry is None else entry.shares.nbytes


class AnswerWatch:
    """Observes the layers of the forward passes that make an answer, and adds what it looked at to a history.

    Args:
        history: Where earlier answers are kept.
        names: The chunks of the prompt, in order.
        bounds: Their token ranges ``[start, end)``.
        num_layers: Number of layers of the model.

    Attributes:
        earlier: What is known of each chunk, as ``AnswerHistory.get`` gives it.
    """

    def __init__(
        self,
        history: AnswerHistory,
        names: Sequence[ChunkName],
        bounds: Sequence[tuple[int, int]],
        num_layers: int,
    ) -> None:
        self._history, self._names, self._bounds, self._num_layers = history, tuple(names), tuple(bounds), num_layers
        self._paid: list[torch.Tensor] = []
        self._calls = 0
        self.earlier = [
            history.get(*name, end - start) for name, (start, end) in zip(self._names, self._bounds, strict=True)
        ]

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        positions: torch.Tensor,
        window: int | None,
        scaling: float,
        softcap: float | None,
    ) -> None:
        """Record a layer of one forward pass over tokens of the answer; an ``AttentionObserver``."""
        paid = attention_mass(query, key, positions, window, scaling, softcap)[: self._bounds[-1][1]]
        layer_idx = self._calls % self._num_layers
        self._calls += 1
        if layer_idx == len(self._paid):
            self._paid.append(paid)
        else:
            self._paid[layer_idx] += paid

    def keep(self) -> None:
        """Add what was recorded to the history; nothing when no token of the answer was run.

        Every layer counts alike, and an answer's attention to all chunks of its prompt adds up to 1, so that a chunk
        that an answer made no use of gets little. A chunk that occurs twice gets the mean.
        """
        if not self._paid:
            return
        paid = torch.stack([layer.cpu() for layer in self._paid])
        to_chunks = sum(paid[:, start:end].sum(dim=1, keepdim=True) for start, end in self._bounds)
        shares = (paid / torch.as_tensor(to_chunks).clamp(min=1e-12)).mean(dim=0)
        found: defaultdict[ChunkName, list[torch.Tensor]] = defaultdict(list)
        for name, (start, end) in zip(self._names, self._bounds, strict=True):
            found[name].append(shares[start:end])
        for name, copies in found.items():
            self._history.add(*name, torch.stack(copies).mean(dim=0))
