"""Computes the KV of single chunks behind neutral contexts, and how much it depends on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.config import EncodeConfig
from cachecraft_rag.keys import context_hash
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.neutral_passages import NEUTRAL_PASSAGES
from cachecraft_rag.prompt import PromptEncoder
from cachecraft_rag.prompt_kv import PromptKV

_PASSAGE_TOKENS = 256


class ChunkEncoder:
    """Computes chunks one by one behind the same contexts, whose own KV is computed once.

    A chunk's KV in a prompt depends on what stands before it, which is not known when it is stored. What is nearest to
    all that may come, in the mean square, is the average over contexts; how far single contexts are from it says how
    wrong each token's KV is going to be, which is the static sensitivity. Both come from the same passes.

    Args:
        adapter: The model.
        contexts: What every chunk is computed behind, each in turn. The first gives the KV until the sensitivity is
            measured; those after it count for the average only if they are as long, so that keys have one base.
        average: Whether the KV is the average over all contexts once they were all seen, or that of the first.

    Attributes:
        prefix_ids: The first context.
        context: ``context_hash`` of what the KV is made of: part of every key.
        context_tokens: Length of the longest context.
        num_passes: Passes over a chunk that its KV and its sensitivity take together.

    Raises:
        ValueError: Fewer than two contexts, or contexts of several lengths to average over.
    """

    def __init__(self, adapter: ModelAdapter, contexts: Sequence[Sequence[int]], average: bool = False) -> None:
        if len(contexts) < 2:
            raise ValueError(f"contexts: {len(contexts)} given; a sensitivity takes at least 2")
        if average and len({len(context) for context in contexts}) > 1:
            raise ValueError(f"contexts: lengths {[len(context) for context in contexts]}; an average takes equal ones")
        self._contexts = [tuple(context) for context in contexts]
        self.prefix_ids = self._contexts[0]
        self.context = context_hash(
            [token for context in self._contexts for token in context] if average else self.prefix_ids
        )
        self.context_tokens = max(map(len, self._contexts))
        self.num_passes = len(self._contexts)
        self._adapter, self._average = adapter, average
        self._context_kv: dict[tuple[int, ...], PromptKV] = {}

    @classmethod
    def of(cls, settings: EncodeConfig, adapter: ModelAdapter, prompts: PromptEncoder) -> ChunkEncoder:
        """The encoder that settings describe: contexts are made of the chat head, the instruction and passages."""
        if settings.behind == "passages":
            return cls(adapter, _passage_contexts(prompts, settings.instruction), average=True)
        instruction = settings.instruction if settings.behind == "prefix" else ""
        prefix = () if settings.behind == "none" else prompts.head_ids(instruction)
        return cls(adapter, (prefix, prompts.head_ids(NEUTRAL_PASSAGES[0])[:_PASSAGE_TOKENS]))

    def encode(self, token_ids: Sequence[int], with_sensitivity: bool) -> ChunkKV:
        """Compute a chunk's KV.

        Args:
            token_ids: The chunk's ids, at least one.
            with_sensitivity: Whether to see the other contexts too, one pass each.
        """
        keys, values = self._run(self.prefix_ids, token_ids)
        chunk_kv = ChunkKV(keys, values, tuple(token_ids), len(self.prefix_ids))
        return self.measure(chunk_kv) if with_sensitivity else chunk_kv

    def measure(self, chunk_kv: ChunkKV) -> ChunkKV:
        """Add the static sensitivity to a chunk's KV, as ``encode`` made it, and average it over the contexts.

        Sensitivity, per layer and token: the mean squared difference of the values between two contexts, over the
        layer's mean squared value.

        Raises:
            ValueError: The KV was made at another place.
        """
        if chunk_kv.base != len(self.prefix_ids):
            raise ValueError(f"chunk_kv: its base is {chunk_kv.base}, not {len(self.prefix_ids)} as made by encode()")
        device, dtype = self._adapter.device, chunk_kv.values.dtype
        mean_keys, mean_values = (
            tensor.to(device, torch.float32, copy=True) for tensor in (chunk_kv.keys, chunk_kv.values)
        )
        deviation = torch.zeros(mean_values.shape[0], mean_values.shape[2], device=device)
        for count, context in enumerate(self._contexts[1:], start=2):  # Welford's update of mean and deviation
            keys, values = self._run(context, chunk_kv.token_ids)
            change = values.float() - mean_values
            deviation += change.square().sum(dim=(1, 3)) * ((count - 1) / count)
            mean_values += change / count
            if self._average:
                mean_keys += (keys.float() - mean_keys) / count
        scale = mean_values.square().mean(dim=2).sum(dim=(1, 2))
        sensitivity = deviation * (2 / (self.num_passes - 1)) / scale.clamp(min=1e-12)[:, None]
        if self._average:
            chunk_kv = replace(chunk_kv, keys=mean_keys.to(dtype), values=mean_values.to(dtype))
        return chunk_kv.with_sensitivity(sensitivity.to(torch.float16).cpu())

    def _run(self, before: tuple[int, ...], token_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = len(before), len(before) + len(token_ids)
        kv = self._adapter.new_kv(end)
        if before:
            context = self._computed(before)
            kv.place(0, context.keys[:, 0], context.values[:, 0])
        self._adapter.forward_rows(torch.tensor(list(token_ids)), torch.arange(start, end), kv)
        return kv.slice(start, end)

    def _computed(self, before: tuple[int, ...]) -> PromptKV:
        if before not in self._context_kv:
            kv = self._adapter.new_kv(len(before))
            self._adapter.forward_rows(torch.tensor(before), torch.arange(len(before)), kv)
            self._context_kv[before] = kv
        return self._context_kv[before]


def _passage_contexts(prompts: PromptEncoder, instruction: str) -> list[tuple[int, ...]]:
    """The chat head and the instruction, each time followed by as many tokens of other passages."""
    head = prompts.head_ids(instruction)
    behind = [prompts.head_ids(f"{instruction}{text}\n\n")[len(head) :] for text in NEUTRAL_PASSAGES]
    length = min(_PASSAGE_TOKENS, *map(len, behind))
    return [(*head, *ids[-length:]) for ids in behind]  # their ends, where a chunk may begin
