"""Computes the KV of single chunks behind texts that stand for a prompt, and how much it depends on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.config import EncodeConfig
from cachecraft_rag.keys import context_hash, digest
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.neutral_passages import NEUTRAL_PASSAGES
from cachecraft_rag.prompt import PromptEncoder
from cachecraft_rag.prompt_kv import PromptKV

_PASSAGE_TOKENS = 256
_NEIGHBOUR_CONTEXTS = 2


class ChunkEncoder:
    """Computes chunks one by one behind several contexts; the KV of those that all chunks share is computed once.

    A chunk's KV in a prompt depends on what stands before it, which is not known when it is stored. What is nearest to
    all that may come, in the mean square, is the average over contexts; how far single contexts are from it says how
    wrong each token's KV is going to be, which is the static sensitivity. Both come from the same passes.

    Args:
        adapter: The model.
        contexts: What every chunk is computed behind, each in turn. The first gives the KV until the sensitivity is
            measured; those after it count for the average only if they are as long, so that keys have one base.
        average: Whether the KV is the average over all contexts once they were all seen, or that of the first.
        head_tokens: Length of what all contexts begin with, to be kept where a chunk's neighbours take the place of
            what follows in the contexts after the first; ``None`` where neighbours are left out.
        between: Ids between two neighbours, and behind the last.

    Attributes:
        prefix_ids: The first context.
        context: ``context_hash`` of what the KV is made of, or a digest of that with a place for neighbours: part of
            every key.
        context_tokens: Length of the longest context.
        neighbour_tokens: How many tokens of a chunk's neighbours it has room for.

    Raises:
        ValueError: Fewer than two contexts, or contexts of several lengths to average over.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        contexts: Sequence[Sequence[int]],
        average: bool = False,
        head_tokens: int | None = None,
        between: Sequence[int] = (),
    ) -> None:
        if len(contexts) < 2:
            raise ValueError(f"contexts: {len(contexts)} given; a sensitivity takes at least 2")
        if average and len({len(context) for context in contexts}) > 1:
            raise ValueError(f"contexts: lengths {[len(context) for context in contexts]}; an average takes equal ones")
        self._contexts = [tuple(context) for context in contexts]
        self.prefix_ids = self._contexts[0]
        self.context = context_hash(
            [token for context in self._contexts for token in context] if average else self.prefix_ids
        )
        if head_tokens is not None:
            self.context = digest("behind neighbours", self.context)
        self.context_tokens = max(map(len, self._contexts))
        room = 0 if head_tokens is None else len(self.prefix_ids) - head_tokens
        self.neighbour_tokens = _NEIGHBOUR_CONTEXTS * room
        self._adapter, self._average = adapter, average
        self._head_tokens, self._between = head_tokens or 0, tuple(between)
        self._context_kv: dict[tuple[int, ...], PromptKV] = {}

    @classmethod
    def of(cls, settings: EncodeConfig, adapter: ModelAdapter, prompts: PromptEncoder) -> ChunkEncoder:
        """The encoder that settings describe: contexts are made of the chat head, the instruction and passages."""
        if settings.behind in ("passages", "neighbours"):
            contexts = _passage_contexts(prompts, settings.instruction)
            if settings.behind == "passages":
                return cls(adapter, contexts, average=True)
            num_head_tokens = len(prompts.head_ids(settings.instruction))
            return cls(adapter, contexts, True, num_head_tokens, prompts.encode_chunk("\n\n"))
        instruction = settings.instruction if settings.behind == "prefix" else ""
        prefix = () if settings.behind == "none" else prompts.head_ids(instruction)
        return cls(adapter, (prefix, prompts.head_ids(NEUTRAL_PASSAGES[0])[:_PASSAGE_TOKENS]))

    def encode(
        self, token_ids: Sequence[int], with_sensitivity: bool, neighbours: Sequence[Sequence[int]] = ()
    ) -> ChunkKV:
        """Compute a chunk's KV.

        Args:
            token_ids: The chunk's ids, at least one.
            with_sensitivity: Whether to see the other contexts too, one pass each.
            neighbours: Ids of chunks like it, the most alike first; of use with the sensitivity only.
        """
        keys, values = self._run(self.prefix_ids, token_ids)
        chunk_kv = ChunkKV(keys, values, tuple(token_ids), len(self.prefix_ids))
        return self.measure(chunk_kv, neighbours) if with_sensitivity else chunk_kv

    def measure(self, chunk_kv: ChunkKV, neighbours: Sequence[Sequence[int]] = ()) -> ChunkKV:
        """Add the static sensitivity to a chunk's KV, as ``encode`` made it, and average it over the contexts.

        Sensitivity, per layer and token: the mean squared difference of the values between two contexts, over the
        layer's mean squared value. ``neighbours`` as in ``encode``.

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
        count = 1
        for context in self._other_contexts(neighbours):  # Welford's update of mean and deviation
            keys, values = self._run(context, chunk_kv.token_ids)
            count += 1
            change = values.float() - mean_values
            deviation += change.square().sum(dim=(1, 3)) * ((count - 1) / count)
            mean_values += change / count
            if self._average:
                mean_keys += (keys.float() - mean_keys) / count
        scale = mean_values.square().mean(dim=2).sum(dim=(1, 2))
        sensitivity = deviation * (2 / (count - 1)) / scale.clamp(min=1e-12)[:, None]
        if self._average:
            chunk_kv = replace(chunk_kv, keys=mean_keys.to(dtype), values=mean_values.to(dtype))
        return chunk_kv.with_sensitivity(sensitivity.to(torch.float16).cpu())

    def num_computed(self, num_tokens: int, with_sensitivity: bool, neighbours: Sequence[Sequence[int]] = ()) -> int:
        """Tokens that ``encode`` computes for a chunk of so many, without the contexts that all chunks share."""
        others = self._other_contexts(neighbours) if with_sensitivity else []
        return num_tokens + sum(num_tokens + (0 if one in self._contexts else len(one)) for one in others)

    def _other_contexts(self, neighbours: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """The contexts after the first: those of all chunks, or neighbours of this one between head and chunk.

        Each holds every second neighbour, so that they differ, with the most alike nearest to the chunk. What
        they leave free is the end of a passage.
        """
        if not self.neighbour_tokens or not neighbours:
            return self._contexts[1:]
        head, passage = self._contexts[-1][: self._head_tokens], self._contexts[-1][self._head_tokens :]
        contexts = []
        for first in range(min(_NEIGHBOUR_CONTEXTS, len(neighbours))):
            ids: tuple[int, ...] = ()
            for neighbour in neighbours[first::_NEIGHBOUR_CONTEXTS]:
                if len(ids) < len(passage):
                    ids = (*neighbour, *self._between, *ids)
            contexts.append((*head, *(*passage, *ids)[-len(passage) :]))
        return contexts

    def _run(self, before: tuple[int, ...], token_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = len(before), len(before) + len(token_ids)
        kv = self._adapter.new_kv(end)
        first = 0
        if before in self._contexts and before:
            context = self._computed(before)
            kv.place(0, context.keys[:, 0], context.values[:, 0])
            first = start
        ids = [*before, *token_ids][first:]
        self._adapter.forward_rows(torch.tensor(ids), torch.arange(first, end), kv)
        return kv.slice(start, end)

    def _computed(self, before: tuple[int, ...]) -> PromptKV:
        """KV of a context that all chunks share."""
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
