"""transformers with a prefix cache: the KV of earlier prompts is kept, the longest common prefix is reused.

Prompts are kept until the byte budget is full, the least recently used one goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, ClassVar

import torch
from transformers import DynamicCache

from benchmarks.rivals.base import Clock, Engine, Prompt, Reply, Settings
from benchmarks.rivals.transformers_full import FullPrefill

Layers = list[tuple[torch.Tensor, torch.Tensor]]


class PrefixCache(FullPrefill):
    """Keeps what it computed."""

    keeps: ClassVar[bool] = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._memory = settings.memory
        self._kept: OrderedDict[tuple[int, ...], Layers] = OrderedDict()

    def ask(self, prompt: Prompt, max_new_tokens: int) -> Reply:
        """Answer; the first token comes after what is new in the prompt was computed."""
        clock = Clock()
        ids = self.encode(prompt)
        cache, length = self._longest(tuple(ids[0].tolist()))
        output = self.generate(ids, clock, max_new_tokens, past_key_values=cache)
        reply = clock.reply(self.decode(output[0, ids.shape[1] :]), ids.shape[1], ids.shape[1] - length)
        self._keep(tuple(ids[0].tolist()), cache)
        return reply

    def _longest(self, ids: tuple[int, ...]) -> tuple[DynamicCache, int]:
        """A cache that holds the longest prefix of a prompt that is known, its last token left to be computed."""
        cache = DynamicCache()
        lengths = {known: min(common_length(known, ids), len(ids) - 1) for known in self._kept}
        best = max(lengths, key=lengths.__getitem__, default=None)
        if best is None or lengths[best] == 0:
            return cache, 0
        self._kept.move_to_end(best)
        for index, (keys, values) in enumerate(self._kept[best]):
            cache.update(keys[:, :, : lengths[best]], values[:, :, : lengths[best]], index)
        return cache, lengths[best]

    def _keep(self, ids: tuple[int, ...], cache: DynamicCache) -> None:
        self._kept.pop(ids, None)
        self._kept[ids] = [
            (keys[:, :, : len(ids)].clone(), values[:, :, : len(ids)].clone()) for keys, values in _layers(cache)
        ]
        while sum(map(_nbytes, self._kept.values())) > self._memory:
            self._kept.popitem(last=False)


def common_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common beginning of two sequences."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _layers(cache: Any) -> Layers:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _nbytes(layers: Layers) -> int:
    return sum(keys.nbytes + values.nbytes for keys, values in layers)


def load(settings: Settings) -> Engine:
    """The engine."""
    return PrefixCache(settings)
