"""Computes the KV of single chunks, behind the canonical prefix, and their static sensitivity."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.keys import context_hash
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.prompt_kv import PromptKV


class ChunkEncoder:
    """Computes chunks one by one behind the same prefix, whose own KV is computed once.

    Args:
        adapter: The model.
        prefix_ids: What every chunk is computed behind; may be empty.
        neutral_ids: An unrelated passage; the chunk's values behind it show how much they depend on context.

    Attributes:
        prefix_ids: As given.
        context: ``context_hash`` of the prefix: part of every key.
    """

    def __init__(self, adapter: ModelAdapter, prefix_ids: Sequence[int], neutral_ids: Sequence[int]) -> None:
        self.prefix_ids = tuple(prefix_ids)
        self.context = context_hash(self.prefix_ids)
        self._adapter = adapter
        self._neutral_ids = tuple(neutral_ids)
        self._prefix_kv: dict[tuple[int, ...], PromptKV] = {}

    def encode(self, token_ids: Sequence[int], with_sensitivity: bool) -> ChunkKV:
        """Compute a chunk's KV.

        Args:
            token_ids: The chunk's ids, at least one.
            with_sensitivity: Whether to measure its sensitivity too, which takes a second pass.
        """
        keys, values = self._run(self.prefix_ids, token_ids)
        chunk_kv = ChunkKV(keys, values, tuple(token_ids), len(self.prefix_ids))
        return self.measure(chunk_kv) if with_sensitivity else chunk_kv

    def measure(self, chunk_kv: ChunkKV) -> ChunkKV:
        """Add the static sensitivity to a chunk's KV.

        Per layer and token: the squared change of the values when the chunk stands behind the neutral passage, over the
        layer's mean squared value.
        """
        _, other = self._run(self._neutral_ids, chunk_kv.token_ids)
        values = chunk_kv.values.to(other.device)
        change = (values.float() - other.float()).square().sum(dim=(1, 3))
        scale = values.float().square().mean(dim=2).sum(dim=(1, 2))
        sensitivity = change / scale.clamp(min=1e-12)[:, None]
        return chunk_kv.with_sensitivity(sensitivity.to(torch.float16).cpu())

    def _run(self, before: tuple[int, ...], token_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = len(before), len(before) + len(token_ids)
        kv = self._adapter.new_kv(end)
        if before:
            prefix = self._computed(before)
            kv.place(0, prefix.keys[:, 0], prefix.values[:, 0])
        self._adapter.forward_rows(torch.tensor(list(token_ids)), torch.arange(start, end), kv)
        return kv.slice(start, end)

    def _computed(self, before: tuple[int, ...]) -> PromptKV:
        if before not in self._prefix_kv:
            kv = self._adapter.new_kv(len(before))
            self._adapter.forward_rows(torch.tensor(before), torch.arange(len(before)), kv)
            self._prefix_kv[before] = kv
        return self._prefix_kv[before]
