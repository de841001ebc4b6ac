"""The tokens that may be recomputed: where they stand, whose they are, and what is stored about them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from cachecraft_rag.chunk_kv import LayeredKV
from cachecraft_rag.deviation import token_features
from cachecraft_rag.plan import RequestPlan
from cachecraft_rag.prompt_kv import PromptKV


class Candidates:
    """All tokens of a prompt's approximate chunks but the prompt's last, which is computed in any case.

    What is stored about them is looked up when it is asked for, and once.

    Args:
        plan: What is where.
        chunk_kvs: The KV of the prompt's chunks.
        num_layers: Layers of the model.

    Attributes:
        positions: Their positions in the prompt, ``[num_candidates]`` int64, increasing.
    """

    def __init__(self, plan: RequestPlan, chunk_kvs: Sequence[LayeredKV | None], num_layers: int) -> None:
        self._plan, self._chunk_kvs, self._num_layers = plan, chunk_kvs, num_layers
        last = plan.num_tokens - 1
        runs = [torch.arange(chunk.start, min(chunk.end, last)) for chunk in plan.approximate]
        self.positions = torch.cat(runs) if runs else torch.empty(0, dtype=torch.long)

    def __len__(self) -> int:
        return self.positions.numel()

    @cached_property
    def chunk_index(self) -> torch.Tensor:
        """Number of the chunk of each, ``[num_candidates]`` int64, increasing."""
        ends = torch.tensor([chunk.end for chunk in self._plan.chunks], dtype=torch.long)
        return torch.searchsorted(ends, self.positions, right=True)

    @cached_property
    def offset_in_chunk(self) -> torch.Tensor:
        """Place of each in its chunk, ``[num_candidates]`` int64."""
        starts = torch.tensor([chunk.start for chunk in self._plan.chunks], dtype=torch.long)
        return self.positions - starts[self.chunk_index]

    @cached_property
    def sensitivity(self) -> torch.Tensor:
        """How much its values depend on context, ``[num_layers, num_candidates]`` float32; 1 where that isn't known."""
        known = [None if kv is None else kv.sensitivity for kv in self._chunk_kvs]
        return self.gather(known, missing=torch.ones(self._num_layers, len(self)))

    @cached_property
    def comparable_sensitivity(self) -> torch.Tensor:
        """The same with the mean of the layer where it isn't known: 1 is far above what is measured."""
        ones = [None if kv is None or kv.sensitivity is None else torch.ones(kv.num_tokens) for kv in self._chunk_kvs]
        known = self.gather(ones) > 0
        if not known.any() or known.all():
            return self.sensitivity
        mean = self.sensitivity[:, known].mean(dim=1, keepdim=True)
        return torch.where(known, self.sensitivity, mean)

    @cached_property
    def inter_attention(self) -> torch.Tensor:
        """Attention that each paid to other chunks when its KV was made, ``[num_candidates]`` float32; else 0."""
        return self.gather([None if kv is None else kv.inter_attention for kv in self._chunk_kvs])

    def gather(self, by_chunk: Sequence[torch.Tensor | None], missing: torch.Tensor | None = None) -> torch.Tensor:
        """What is known of every chunk's tokens, for the candidates among them.

        Args:
            by_chunk: ``[..., num_tokens]`` for every chunk of the prompt, ``None`` where nothing is known.
            missing: What stands for it, ``[..., num_candidates]`` float32, written over; zeros when not given.

        Returns:
            ``[..., num_candidates]`` float32.
        """
        found = torch.zeros(len(self)) if missing is None else missing
        for index, known in enumerate(by_chunk):
            if known is not None:
                inside = self._of(index)
                found[..., inside] = known[..., self.offset_in_chunk[inside]].float()
        return found

    def by_chunk(self, values: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Values of the candidates as those of whole chunks: the other way round.

        Args:
            values: ``[num_candidates]``.

        Returns:
            ``[num_tokens]`` float32 for every chunk of the prompt, 0 for its last token where that ends the prompt;
            ``None`` for a chunk without candidates.
        """
        whole: list[torch.Tensor | None] = []
        for index, chunk in enumerate(self._plan.chunks):
            inside = self._of(index)
            scattered = torch.zeros(chunk.end - chunk.start)
            scattered[self.offset_in_chunk[inside]] = values.cpu()[inside]
            whole.append(scattered if inside.start < inside.stop else None)
        return tuple(whole)

    def features(self, token_ids: torch.Tensor, kv: PromptKV) -> torch.Tensor:
        """What their deviation is predicted from, as ``token_features`` gives it.

        Args:
            token_ids: ``[num_tokens]`` int64, the whole prompt.
            kv: The buffer with the stored chunks in place.
        """
        lengths = torch.tensor([chunk.end - chunk.start for chunk in self._plan.chunks])
        places = self.positions.to(kv.keys.device)
        norms = [kv.layer(n)[0][:, places].float().square().sum(dim=(0, 2)).sqrt() for n in range(self._num_layers)]
        return token_features(
            token_ids[self.positions],
            self.chunk_index,
            self.offset_in_chunk,
            lengths[self.chunk_index],
            self.sensitivity,
            torch.stack(norms),
        )

    def _of(self, index: int) -> slice:
        """Which of them belong to a chunk."""
        first, end = torch.searchsorted(self.chunk_index, torch.tensor([index, index + 1])).tolist()
        return slice(first, end)
